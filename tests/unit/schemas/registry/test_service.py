from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from anabranch_schemas.errors import Action, ConfigError, RegistryError
from anabranch_schemas.registry import ServiceRegistry, TopicRegistry, connect


class Service(BaseHTTPRequestHandler):
    """Answers as Confluent's registry does, for the two calls that are made."""

    schemas: list[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["schema"] == "bad":
            self._answer(422, {"error_code": 42201, "message": "Invalid schema"})
            return
        if body["schema"] not in self.schemas:
            self.schemas.append(body["schema"])
        self._answer(200, {"id": self.schemas.index(body["schema"]) + 1})

    def do_GET(self) -> None:
        number = int(self.path.split("?")[0].rsplit("/", 1)[1])
        if number > len(self.schemas):
            self._answer(404, {"error_code": 40403, "message": "Schema not found"})
        else:
            self._answer(200, {"schema": self.schemas[number - 1]})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Service.schemas = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_schema_is_registered_once_and_read_back(url: str) -> None:
    registry = ServiceRegistry({"url": url})
    first, second = registry.register("a-value", '"string"'), registry.register("b-value", '"long"')
    assert (first, second, registry.register("a-value", '"string"')) == (1, 2, 1)
    assert ServiceRegistry({"url": url}).schema(2) == '"long"'


def test_a_refusal_says_why(url: str) -> None:
    with pytest.raises(RegistryError, match=r"under a-value: .*Invalid schema") as caught:
        ServiceRegistry({"url": url}).register("a-value", "bad")
    assert (caught.value.where, caught.value.action) == (url, Action.RETRY)


def test_an_unknown_id_is_an_error(url: str) -> None:
    with pytest.raises(RegistryError, match="could not read schema 9"):
        ServiceRegistry({"url": url}).schema(9)


def test_a_property_of_the_wrong_kind_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match=r"max\.retries"):
        ServiceRegistry({"url": "http://127.0.0.1:1", "max.retries": "many"})


def test_without_a_service_the_topic_is_used(url: str) -> None:
    assert isinstance(connect({}), TopicRegistry)
    assert isinstance(connect({}, {"url": url}), ServiceRegistry)
