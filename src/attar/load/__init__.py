"""The load generator behind `attar bench-serve`: traces, arrival times, a streaming client, measures, charts.

The package knows HTTP servers from outside and imports no other package of attar, and no torch. Start reading in
`sweep`.
"""
