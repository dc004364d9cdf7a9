"""Local server with the subset of W&B's API that `wandb sweep` and `wandb agent` use: five GraphQL operations.

It stores the uploaded sweep files and assigns the runs queued by a test, one at a time per sweep.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "nobody"
PROJECT = "sweeps"


class AgentServer:
    """Responds while used as a context manager. Sweeps are named `sweep-0`, `sweep-1`, ... in order of arrival."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        """Uploaded sweep files by sweep name."""
        self.operations: list[str] = []
        self._queued: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of_agents": self}))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> AgentServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self) -> dict[str, str]:
        """Return the environment variables that log the client in to this server."""
        url = f"http://127.0.0.1:{self._http.server_port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4, "WANDB_ERROR_REPORTING": "false"}

    def queue(self, sweep: str, run_id: str, values: dict[str, Any]) -> None:
        """Queue a run of `sweep`."""
        args = {key: {"value": value} for key, value in values.items()}
        self._queued[sweep].append({"type": "run", "run_id": run_id, "program": "launch/train.py", "args": args})

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the `data` of a GraphQL operation."""
        name = re.search(r"(?:query|mutation)\s+(\w+)", query).group(1)
        with self._lock:
            self.operations.append(name)
            return getattr(self, f"_answer_{name}", lambda given: {})(given)

    def _answer_Viewer(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}

    def _answer_UpsertSweep(self, given: dict[str, Any]) -> dict[str, Any]:
        name = f"sweep-{len(self.files)}"
        self.files[name] = given["config"]
        project = {"id": "p", "name": PROJECT, "entity": {"id": "e", "name": ENTITY}}
        return {"upsertSweep": {"sweep": {"name": name, "project": project}, "configValidationWarnings": []}}

    def _answer_SweepWithRuns(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["sweep"]
        sweep = {"id": name, "name": name, "state": "RUNNING", "config": self.files[name], "runs": {"edges": []}}
        return {"project": {"sweep": sweep}}

    def _answer_CreateAgent(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"createAgent": {"agent": {"id": given["sweep"]}}}

    def _answer_Heartbeat(self, given: dict[str, Any]) -> dict[str, Any]:
        queued, running = self._queued[given["id"]], json.loads(given["runState"])
        commands = [] if running else [queued.popleft() if queued else {"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": given["id"]}, "commands": json.dumps(commands)}}


class _Handler(BaseHTTPRequestHandler):
    server_of_agents: AgentServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"data": self.server_of_agents.answer(request["query"], request.get("variables") or {})}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Disable logging."""
