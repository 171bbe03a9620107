"""A stand-in for another engine's server, with OpenAI's API: it streams the token ids 1, 2, 3... as
text.

    python stand_in.py PORT BEHAVIOUR

BEHAVIOUR is JSON: the fields of a Behaviour that are not the default.
"""

import json
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Behaviour:
    """Requests that the server takes, and its misbehaviour."""

    models: tuple = ("stand-in",)
    takes_ids: bool = True
    takes: tuple = ("ignore_eos", "return_token_ids", "cache_salt", "cache_prompt", "top_k")
    usage: bool = True
    usage_has_choices: bool = True  # the last event with usage has an empty list of them
    lagging_usage: bool = False  # in every event, and 0 until the last
    reason: str | None = "length"  # the finish_reason of the last chunk
    done: bool = True  # the stream ends with [DONE]
    # Tokens of an answer, after the first two requests (the probe and the warm-up).
    most: int = 1 << 30
    per_chunk: int = 2  # tokens of a chunk
    chunk_s: float = 0.0  # between two chunks
    load_s: float = 0.0  # until it listens
    metrics: str = ""  # vllm or sglang
    status: int = 200
    body: str = ""  # instead of a stream
    dies_at: int = 1 << 30  # a request
    breaks_at: int = 1 << 30  # a request, whose answer ends early
    longest: int = 1 << 30  # prompt that is taken
    busy_ms: int = 0  # after which a request that was refused may be sent again; 0: none is refused
    thinks: int = 0  # chunks that are reasoning, at the beginning of an answer
    ramp_s: float = 0.0  # in addition between the first chunks of an answer, those of RAMP


RAMP = 6


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, behaviour: Behaviour):
        super().__init__(("127.0.0.1", port), Handler)
        self.behaviour, self.asked = behaviour, []
        self.num_rounds, self.refused = 0, set()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(
        self, status: int, body: str, kind: str = "application/json", **headers: str
    ) -> None:
        self.send_response(status)
        for name, value in (
            {"Content-Type": kind, "Content-Length": str(len(body.encode()))} | headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        behaviour = self.server.behaviour
        if self.path == "/v1/models":
            self.answer(
                200,
                json.dumps({"object": "list", "data": [{"id": name} for name in behaviour.models]}),
            )
        elif self.path == "/metrics" and behaviour.metrics:
            self.answer(
                200,
                counters(behaviour.metrics, self.server.num_rounds, behaviour.per_chunk),
                "text/plain",
            )
        else:
            self.answer(200 if self.path == "/health" else 404, "")

    def do_POST(self):
        server, behaviour = self.server, self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = {
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "stream",
            "stream_options",
            "seed",
            "top_p",
        }
        unknown = set(body) - known - set(behaviour.takes)
        if unknown or (isinstance(body["prompt"], list) and not behaviour.takes_ids):
            self.answer(422, json.dumps({"error": {"message": f"what is {sorted(unknown)}?"}}))
            return
        if len(body["prompt"]) > behaviour.longest:
            self.answer(400, json.dumps({"error": {"message": "the prompt is too long"}}))
            return
        asked_for = (str(body["prompt"]), body["max_tokens"])
        if behaviour.busy_ms and asked_for not in server.refused:
            server.refused.add(asked_for)
            self.answer(429, "{}", **{"retry-after-ms": str(behaviour.busy_ms)})
            return
        server.asked.append(body | {"key": self.headers["Authorization"]})
        if len(server.asked) >= behaviour.dies_at:
            threading.Thread(target=server.shutdown).start()
            server.socket.close()
            self.close_connection = True
        elif behaviour.status != 200 or behaviour.body:
            headers = {"Location": "http://127.0.0.1:1/"} if behaviour.status == 307 else {}
            self.answer(behaviour.status, behaviour.body, "text/event-stream", **headers)
        else:
            self.stream(body, breaks=len(server.asked) >= behaviour.breaks_at)

    def stream(self, body: dict, breaks: bool = False) -> None:
        server, behaviour = self.server, self.server.behaviour
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        most = behaviour.most if len(server.asked) > 2 else body["max_tokens"]
        tokens = list(range(1, min(body["max_tokens"], most) + 1))
        starts = range(1, len(tokens), behaviour.per_chunk)
        chunks = [tokens[:1]] + [tokens[start : start + behaviour.per_chunk] for start in starts]
        for number, chunk in enumerate(chunks):
            if number == 2 and breaks:
                break
            time.sleep(behaviour.chunk_s + (behaviour.ramp_s if number < RAMP else 0.0))
            reason = behaviour.reason if number == len(chunks) - 1 else None
            text = "".join(f"[{token}]" for token in chunk)
            choice = {"index": 0, "text": text, "finish_reason": reason}
            if number < behaviour.thinks:
                choice |= {"text": "", "reasoning_content": text}
            usage = (
                {"usage": {"prompt_tokens": 8, "completion_tokens": 0}}
                if behaviour.lagging_usage
                else {}
            )
            choice |= {"token_ids": chunk} if body.get("return_token_ids") else {}
            self.event({"choices": [choice]} | usage)
        else:
            server.num_rounds += len(chunks) - 1
            length = (
                len(body["prompt"])
                if isinstance(body["prompt"], list)
                else len(body["prompt"].split())
            )
            if behaviour.usage:
                usage = {"usage": {"prompt_tokens": length, "completion_tokens": len(tokens)}}
                self.event(usage | ({"choices": []} if behaviour.usage_has_choices else {}))
            self.wfile.write(b"data: [DONE]\n\n" if behaviour.done else b"")
        self.close_connection = True

    def event(self, content: dict) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()


def counters(kind: str, rounds: int, per_chunk: int) -> str:
    """Return the text of /metrics: every round accepts all of its per_chunk - 1 proposals."""
    if kind == "sglang":
        return (
            'sglang:spec_verify_calls_total{model_name="a"}'
            f" {rounds}.0\nsglang:spec_accept_length 9.0\n"
        )
    proposed = rounds * (per_chunk - 1)
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a"}} {rounds}.0',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a"}} {proposed}.0',
    ]
    for position in range(per_chunk - 1):
        label = f'engine="0",model_name="a",position="{position}"'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label}}} {rounds}.0")
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_created{{{label}}} 1.79e+09")
    return "\n".join(lines)


@contextmanager
def standing_in(**behaviour):
    """A stand-in on a thread of this process, and its address."""
    server = Server(0, Behaviour(**behaviour))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    chosen = Behaviour(**json.loads(sys.argv[2]))
    time.sleep(chosen.load_s)
    Server(int(sys.argv[1]), chosen).serve_forever()
