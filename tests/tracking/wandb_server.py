"""A stand-in for Weights & Biases: as much of its API as wandb asks for, and a record of what it
was told.
"""

import gzip
import itertools
import json
import re
import threading
from base64 import b64decode
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

API_KEY = "MARKER00" + "0123456789abcdef" * 2  # of 40 characters, as a user's is
ENTITY = "someone"
NOT_LOGGED_IN = {
    "errors": [{"message": "user is not logged in", "extensions": {"code": "PERMISSION_ERROR"}}]
}


@dataclass
class Received:
    """A run, as it would be found there."""

    facts: dict[str, Any] = field(default_factory=dict)  # project, groupName, jobType, tags ...
    config: dict[str, Any] = field(default_factory=dict)
    # By the streamed file, and by number.
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self):
        lines = self.lines.get("wandb-history.jsonl", {})
        return [json.loads(lines[number]) for number in sorted(lines)]

    @property
    def summary(self):
        lines = self.lines.get("wandb-summary.json", {})
        return json.loads(lines[max(lines)]) if lines else {}


class WandbServer(ThreadingHTTPServer):
    """`with WandbServer() as server:` serves at `server.url`.

    `refuse` is asked first, with a GraphQL field, file_stream or storage, and what was sent: a
    status that it returns is the answer, and 0 none at all.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs = {}  # id -> Received
        self.artifacts = {}  # id -> what it was created with, and its files by name
        self.sweeps = {}  # name -> its configuration and the points still to be given out
        self.views = []  # workspaces and reports
        self.charts = {}  # by entity/name: what draws them
        self.unknown = []  # queries without an answer
        self.refuse = lambda what, sent: None

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Clients that go away are nothing to tell of."""

    def answer(self, field, query, variables):
        method = getattr(self, f"_{field}", None)
        if method is None:
            self.unknown.append(query)
            return None
        return method(**variables)

    def stream(self, run, told):
        received = self.runs[run]
        for name, part in told.get("files", {}).items():
            received.lines.setdefault(name, {}).update(
                enumerate(part["content"], start=part["offset"])
            )
        received.exit_code = told.get("exitcode", received.exit_code)

    def store(self, kind, owner, name, content):
        (self.runs[owner].files if kind == "run" else self.artifacts[owner]["files"])[name] = (
            content
        )

    def table(self, key, run):
        """The rows of a table that a run has logged, from the artifact that W&B makes of it."""
        name = f"run-{run}-{key}"
        files = next(
            a["files"] for a in self.artifacts.values() if a["artifactCollectionName"] == name
        )
        table = json.loads(files[f"{key}.table.json"])
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]

    # What is asked for, by GraphQL field.

    def _viewer(self):
        return {
            "id": "u",
            "entity": ENTITY,
            "username": ENTITY,
            "email": "",
            "flags": "{}",
            "teams": {"edges": []},
        }

    def _serverInfo(self):
        return {"features": []}

    def _upsertBucket(self, name, config, **facts):
        run = self.runs.setdefault(name, Received())
        run.facts |= {key: value for key, value in facts.items() if value is not None}
        run.config = {
            key: entry["value"] for key, entry in json.loads(config or "{}").items()
        } or run.config
        bucket = {
            "id": name,
            "name": name,
            "displayName": facts["displayName"],
            "description": None,
            "config": config,
        }
        # What comes is added.
        bucket |= {"sweepName": facts["sweep"], "historyLineCount": len(run.history)}
        return {"bucket": bucket | {"project": _project_named(facts["project"])}, "inserted": True}

    def _createRunFiles(self, run, files, **_):
        urls = [
            {"name": name, "uploadUrl": f"{self.url}/storage/run/{run}/{name}"} for name in files
        ]
        return {"runID": run, "uploadHeaders": [], "files": urls}

    def _createArtifact(self, input):
        number = str(len(self.artifacts))
        self.artifacts[number] = input | {"files": {}}
        return {
            "artifact": {
                "id": number,
                "state": "PENDING",
                "artifactSequence": {"latestArtifact": None},
            }
        }

    def _createArtifactManifest(self, artifactID, name, **_):
        file = {
            "id": name,
            "uploadUrl": f"{self.url}/storage/artifact/{artifactID}/{name}",
            "uploadHeaders": [],
        }
        return {"artifactManifest": {"id": name, "file": file}}

    def _createArtifactFiles(self, input):
        edges = []
        for file in input["artifactFiles"]:
            artifact, name = file["artifactID"], file["name"]
            url = f"{self.url}/storage/artifact/{artifact}/{name}"
            node = {
                "storagePath": name,
                "uploadUrl": url,
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
            }
            edges.append({"node": node | {"artifact": {"id": artifact}}})
        return {"files": {"edges": edges}}

    def _commitArtifact(self, artifactID):
        return {"artifact": {"id": artifactID, "digest": self.artifacts[artifactID]["digest"]}}

    def _project(self, sweep=None, name=None, **variables):
        if sweep is not None:
            return {
                "sweep": {
                    "id": sweep,
                    "name": sweep,
                    "config": self.sweeps[sweep][0],
                    "runs": {"edges": []},
                }
            }
        if run := self.runs.get(name):
            state = {None: "running", 0: "finished"}.get(run.exit_code, "failed")
            return {
                "run": {"id": name, "name": name, "projectId": "1", "state": state} | _as_json(run)
            }
        return {"id": "p", "internalId": "p"} if "projectName" in variables else None

    def _upsertSweep(self, config, projectName, **_):
        name, parameters = f"sweep{len(self.sweeps)}", yaml.safe_load(config)["parameters"]
        values = [
            entry.get("values") or [entry["min"], entry["max"]] for entry in parameters.values()
        ]
        points = [dict(zip(parameters, point, strict=True)) for point in itertools.product(*values)]
        self.sweeps[name] = (config, enumerate(points))
        return {
            "sweep": {"name": name, "project": _project_named(projectName)},
            "configValidationWarnings": [],
        }

    def _createAgent(self, sweep, **_):
        return {"agent": {"id": sweep}}

    def _agentHeartbeat(self, id, runState, **_):
        """One run at a time, and no more once all points have been given out."""
        commands = []
        if not json.loads(runState):
            config, points = self.sweeps[id]
            number, point = next(points, (None, None))
            command = {
                "type": "run",
                "run_id": f"{id}-run{number}",
                "program": yaml.safe_load(config)["program"],
            }
            command["args"] = {key: {"value": value} for key, value in (point or {}).items()}
            commands = [{"type": "exit"} if point is None else command]
        return {"agent": {"id": id}, "commands": json.dumps(commands)}

    def _models(self, **_):
        return {
            "pageInfo": {"hasNextPage": False, "endCursor": None, "__typename": "PageInfo"},
            "edges": [],
        }

    def _upsertModel(self, input):
        project = {"id": "p", "name": input["name"], "entityName": input["entityName"]}
        return {
            "project": project | dict.fromkeys(("description", "access", "views")),
            "inserted": True,
        }

    def _createCustomChart(self, entity, chartName, spec, **_):
        self.charts[f"{entity}/{chartName}"] = json.loads(spec)
        return {"chart": {"id": f"{entity}/{chartName}"}}

    def _upsertView(self, **view):
        self.views.append(view)
        project = {"id": "p", "name": view["projectName"], "entityName": view["entityName"]}
        saved = view | {"id": f"view{len(self.views)}", "updatedAt": None, "project": project}
        return {"view": saved, "inserted": True}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        status, answer = self._status_and_answer(body)
        if status == 0:
            self.close_connection = True
            return
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _answer

    def _status_and_answer(self, body):
        server, (place, _, rest) = self.server, self.path.strip("/").partition("/")
        if place == "sdk":  # telemetry
            return 200, {}
        request = json.loads(body) if place in ("graphql", "files") else {}
        what, alias = {"files": "file_stream"}.get(place, place), None
        if place == "graphql":
            alias, what = re.search(r"\{\s*(?:(\w+):\s*)?(\w+)", request["query"]).groups()
        status = server.refuse(what, body.decode(errors="replace"))
        if status is not None:
            return status, NOT_LOGGED_IN if status == 401 else {
                "errors": [{"message": "it is down"}]
            }
        if place == "storage":  # by addresses that were given out only to who is known
            server.store(*rest.split("/", 2), body)
            return 200, {}
        if not self._is_known():
            return 401, NOT_LOGGED_IN
        if place == "files":
            server.stream(rest.split("/")[2], request)
            return 200, {}
        return 200, {
            "data": {
                alias or what: server.answer(what, request["query"], request.get("variables") or {})
            }
        }

    def _is_known(self):
        scheme, _, credentials = self.headers.get("Authorization", "").partition(" ")
        return scheme == "Basic" and b64decode(credentials).decode() == f"api:{API_KEY}"

    def log_message(self, *_):
        pass


def _as_json(run):
    parts = {"config": run.config, "summaryMetrics": run.summary, "systemMetrics": {}}
    return {key: json.dumps(part) for key, part in parts.items()} | {
        "user": {"name": ENTITY, "username": ENTITY}
    }


def _project_named(name):
    return {"id": "p", "name": name, "entity": {"id": "e", "name": ENTITY}}
