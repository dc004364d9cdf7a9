"""A server on loopback with as much of W&B's API as `wandb sweep` and `wandb agent` use: five GraphQL operations.

It keeps the sweep files that are sent, and hands out the runs that a test has queued, one at a time to each sweep.
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
    """Answers until it is left as a context. Sweeps are named `sweep-0`, `sweep-1`, ... in the order they come."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        """The sweep files that were sent, by the name of the sweep."""
        self.asked: list[str] = []
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
        """Variables under which the client is logged in here."""
        url = f"http://127.0.0.1:{self._http.server_port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4, "WANDB_ERROR_REPORTING": "false"}

    def queue(self, sweep: str, run_id: str, values: dict[str, Any]) -> None:
        """The next run of `sweep`."""
        args = {key: {"value": value} for key, value in values.items()}
        self._queued[sweep].append({"type": "run", "run_id": run_id, "program": "launch/train.py", "args": args})

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """The `data` of a GraphQL operation."""
        name = re.search(r"(?:query|mutation)\s+(\w+)", query).group(1)
        with self._lock:
            self.asked.append(name)
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
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"data": self.server_of_agents.answer(asked["query"], asked.get("variables") or {})}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""
