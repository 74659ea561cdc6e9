"""Ray Serve: a fleet of attar's engines on a cluster that Ray schedules.

`app.py` is the import path of a Serve application: `http.py` is attar's own HTTP process as one deployment, and
`engine.py` an engine's process as each replica of another. `fleet.py` stands in the HTTP process where a group of
engines stands otherwise, and `router.py` chooses a replica for requests that name none. `wire.py` is what the processes
exchange, `scorer.py` what is known of replicas, and `autoscaling.py` how many there should be. `config.py` writes the
application's file, `start.py` runs it on this machine, `exposure.py` looks at what listens, and `batch.py` is for
datasets.

Imports: `server`, `routing`, `protocol`, `text`, `checkpoints` and the leaf modules. Only `app.py`, `router.py`,
`start.py` and `batch.py` import Ray when they are imported. Start with `app.py`.
"""
