"""A reward's server: `python -m benchmarks.reward_server HOST PORT`. A response's score is its share of letters e."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scores(BaseHTTPRequestHandler):
    """Answers as docs/rewards.md says of endpoints."""

    def do_POST(self) -> None:
        responses = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"]
        scores = [text.count("e") / max(1, len(text)) for text in responses]
        answer = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: object) -> None:
        """Writes nothing: a request per micro-batch is too much to read."""


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Scores).serve_forever()
