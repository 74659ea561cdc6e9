from attar.cli.main import app

app()
