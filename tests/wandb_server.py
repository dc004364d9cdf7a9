"""A small server on loopback that speaks enough of W&B's API for the real client to run online against it.

    with WandbServer() as server:
        environment = os.environ | server.environment()
        ...
        server.run("abcd1234").rows

`mode` says how it behaves from now on: `ok`, `broken` (every answer is 500), `hanging` (no answer at all) and
`refusing` (the key is not accepted, 401).
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Mode = Literal["ok", "broken", "hanging", "refusing"]
KEY = "0123456789abcdef" * 2 + "01234567"
ENTITY = "nobody"


@dataclass
class StoredRun:
    """What the server was told of one run."""

    id: str
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """History in the order in which it came."""
    exit_code: int | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    artifacts: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Artifact -> file -> content."""
    details: dict[str, Any] = field(default_factory=dict)
    """The last display name, group and tags."""


class WandbServer:
    """Answers until it is left as a context."""

    def __init__(self, mode: Mode = "ok") -> None:
        self.mode: Mode = mode
        self.runs: dict[str, StoredRun] = {}
        self.asked: list[str] = []
        """Every GraphQL operation and path, in order."""
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._http = _QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"wandb": self}))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def environment(self) -> dict[str, str]:
        """Variables under which the client is logged in here."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": KEY,
            "WANDB_MODE": "online",
            "WANDB_ERROR_REPORTING": "false",
        }

    def run(self, run_id: str) -> StoredRun:
        return self.runs.setdefault(run_id, StoredRun(run_id))

    # ------------------------------------------------------------------------------------------------------- answers

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """The `data` of a GraphQL operation; nothing for those that the client can do without."""
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = found.group(1) if found else "introspection"
        self.asked.append(name)
        method = getattr(self, f"_{_snake(name)}", None)
        return method(given) if method else {}

    def _viewer(self, given: dict[str, Any]) -> dict[str, Any]:
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        return {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": teams}}

    def _run_resume_status(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(given["name"])
        model: dict[str, Any] = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": ENTITY}}
        if run is None:
            return {"model": model | {"bucket": None}}
        counts = {"historyLineCount": len(run.rows), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]), "eventsTail": "[]"}
        contents = {"config": json.dumps(run.config), "summaryMetrics": json.dumps(run.summary), "tags": []}
        bucket = (
            {"id": run.id, "name": run.id, "displayName": run.id, "wandbConfig": '{"t": {}}'}
            | counts
            | tails
            | contents
        )
        return {"model": model | {"bucket": bucket}}

    def _upsert_bucket(self, given: dict[str, Any]) -> dict[str, Any]:
        new = given["name"] not in self.runs
        run = self.run(given["name"])
        run.project = given.get("project") or run.project
        run.config = json.loads(given.get("config") or "null") or run.config
        run.details |= {key: given[key] for key in ("displayName", "groupName", "tags") if given.get(key)}
        project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": ENTITY}}
        bucket = {"id": run.id, "name": run.id, "displayName": given.get("displayName"), "project": project}
        bucket |= {"sweepName": None, "historyLineCount": len(run.rows), "config": json.dumps(run.config)}
        return {"upsertBucket": {"bucket": bucket, "inserted": new}}

    def _create_run_files(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/upload/{given['run']}/{name}"} for name in given.get("files", [])
        ]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def _artifact_type(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def _create_artifact(self, given: dict[str, Any]) -> dict[str, Any]:
        sent = given["input"]
        artifact_id = sent["artifactCollectionName"]
        self.run(sent["runName"]).artifacts[artifact_id] = {}
        artifact = {"id": artifact_id, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def _create_artifact_manifest(self, given: dict[str, Any]) -> dict[str, Any]:
        upload = {"uploadUrl": f"{self.url}/manifest", "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": {"id": "f"} | upload}}}

    def _create_artifact_files(self, given: dict[str, Any]) -> dict[str, Any]:
        nodes = []
        for file in given["input"]["artifactFiles"]:
            path = f"{file['artifactID']}/{file['name']}"
            upload = {"uploadUrl": f"{self.url}/artifact/{path}", "uploadHeaders": [], "uploadMultipartUrls": None}
            nodes.append({"node": {"storagePath": path, "artifact": {"id": file["artifactID"]}} | upload})
        return {"createArtifactFiles": {"files": {"edges": nodes}}}

    def _commit_artifact(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}

    def _artifact_by_id(self, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "internalId": "1", "name": "project", "entity": {"name": ENTITY}}
        sequence = {"__typename": "ArtifactSequence", "name": given["id"], "project": project}
        artifact = {"__typename": "Artifact", "id": given["id"], "state": "COMMITTED", "artifactSequence": sequence}
        artifact |= {"artifactType": {"name": "model"}, "versionIndex": 0, "aliases": [], "tags": [], "metadata": "{}"}
        artifact |= {"size": "1", "fileCount": 1, "digest": "", "commitHash": "", "description": None}
        artifact |= {"ttlDurationSeconds": 0, "ttlIsInherited": True, "historyStep": 0}
        return {"artifact": artifact | {"createdAt": "2026-01-01T00:00:00", "updatedAt": None}}

    # --------------------------------------------------------------------------------------------------- file stream

    def receive(self, run_id: str, sent: dict[str, Any]) -> None:
        """A part of a run's history and summary, or its end."""
        run = self.run(run_id)
        files = sent.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            rows = [json.loads(line) for line in history["content"]]
            run.rows[history["offset"] :] = rows
        if summary := files.get("wandb-summary.json"):
            run.summary = json.loads(summary["content"][-1])
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed leaves its connections open."""


class _Handler(BaseHTTPRequestHandler):
    wandb: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server = self.wandb
        if server.mode == "hanging":
            server.closing.wait()
            self.close_connection = True
        elif server.mode == "broken":
            self._send({"error": "out of order"}, 500)
        elif server.mode == "refusing":
            self._send({"errors": [{"message": "user is not logged in"}]}, 401)
        else:
            with server.lock:
                answer = self._answer(body)
            self._send(answer)

    do_GET = do_PUT = do_POST

    def _answer(self, body: bytes) -> dict[str, Any]:
        if self.path == "/graphql":
            asked = json.loads(body)
            return {"data": self.wandb.answer(asked["query"], asked.get("variables") or {})}
        self.wandb.asked.append(f"{self.command} {self.path}")
        if found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.wandb.receive(found.group(1), json.loads(body))
        elif found := re.fullmatch(r"/upload/([^/]+)/(.+)", self.path):
            self.wandb.run(found.group(1)).files[found.group(2)] = body
        elif found := re.fullmatch(r"/artifact/([^/]+)/(.+)", self.path):
            run = next(run for run in self.wandb.runs.values() if found.group(1) in run.artifacts)
            run.artifacts[found.group(1)][found.group(2)] = body
        return {}

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
