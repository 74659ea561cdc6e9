"""Charts of reports, load tests and simulators: data in, SVG or PNG out.

It imports the standard library only, and matplotlib where a PNG is drawn. Start at `chart.py`: a `Chart` is data, and
`laid_out` places everything in it. `svg.py` and `png.py` draw that.
"""
