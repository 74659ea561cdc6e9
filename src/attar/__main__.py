from attar.cli import app

app()
