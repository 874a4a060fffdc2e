"""Loads a project with Argilla's own client, and prints what it sends to the server. Needs argilla 2.8.0."""

import json
import sys

import argilla as rg

from tests.preferences.samples.argilla_server import serve

server = serve()
client = rg.Argilla(api_url=server.url, api_key="key")
dataset = rg.Dataset.from_disk(sys.argv[1], workspace="labels", client=client)
names = {part: [own["name"] for own in server.parts[part]] for part in ("fields", "questions")}
print(json.dumps({**names, "records": server.records}))
