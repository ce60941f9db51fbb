"""The pipeline file: one YAML document, checked whole before anything starts.

Unknown keys are errors that name the path and the nearest known key; `${env:NAME}` and `${file:PATH}` fill in secrets.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from anabranch_schemas.errors import ConfigError

_REFERENCE = re.compile(r"\$\{(env|file):([^}]+)\}")
_NAME = r"^[a-z0-9]([a-z0-9_-]{0,38}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=_NAME)]


class _Part(BaseModel):
    """Base of all parts: nothing unknown, nothing changed later, dots in keys as Kafka writes them."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Registry(_Part):
    """A Confluent-compatible schema registry; properties of confluent-kafka's client pass through."""

    model_config = ConfigDict(extra="allow", frozen=True)
    url: str


class Site(_Part):
    """A place that owns a database."""

    id: Annotated[int, Field(ge=1, le=65535)]
    name: Name


class Snapshot(_Part):
    """When a source closes its snapshots."""

    quiet_ms: Annotated[float, Field(alias="quiet.ms", gt=0)] = 5.0
    interval_ms: Annotated[float, Field(alias="interval.ms", gt=0)] = 200.0
    max_bytes: Annotated[int, Field(alias="max.bytes", ge=1024)] = 16 << 20
    idle_ms: Annotated[float, Field(alias="idle.ms", ge=50)] = 1000.0


class Topics(_Part):
    """How a source creates its topics."""

    partitions: Annotated[int, Field(ge=1)] = 1
    replication_factor: Annotated[int, Field(alias="replication.factor", ge=-1)] = -1
    config: dict[str, str] = {}


class Source(_Part):
    """A database that is read."""

    name: Name
    site: Name
    connector: Literal["postgres"]
    dsn: SecretStr
    tables: Annotated[tuple[str, ...], Field(min_length=1)] = ("*.*",)
    prefix: Annotated[str | None, Field(pattern=r"^[a-zA-Z0-9._-]{1,150}$")] = None
    slot_name: Annotated[str | None, Field(alias="slot.name", pattern=r"^[a-z0-9_]{1,63}$")] = None
    publication_name: Annotated[str | None, Field(alias="publication.name")] = None
    publication_adopt: Annotated[bool, Field(alias="publication.adopt")] = False
    key_columns: Annotated[dict[str, tuple[str, ...]], Field(alias="key.columns")] = {}
    unknown_types: Annotated[Literal["text", "fail"], Field(alias="unknown.types")] = "text"
    tombstones: Annotated[bool, Field(alias="tombstones.on.delete")] = True
    heartbeat_ms: Annotated[float, Field(alias="heartbeat.interval.ms", ge=0)] = 10_000.0
    copy_chunk_rows: Annotated[int, Field(alias="copy.chunk.rows", ge=1)] = 50_000
    spill_bytes: Annotated[int, Field(alias="spill.bytes", ge=4096)] = 64 << 20
    spill_dir: Annotated[Path | None, Field(alias="spill.dir")] = None
    snapshot: Snapshot = Snapshot()
    topics: Topics = Topics()


class Spark(_Part):
    """Where and how a sink's Spark runs."""

    master: str = "local[2]"
    conf: dict[str, str] = {}
    jars: tuple[Path, ...] | None = None
    """None: the locked set that `anabranch` fetches itself."""


class Sink(_Part):
    """A database that is written."""

    name: Name
    site: Name
    connector: Literal["postgres"]
    dsn: SecretStr
    mode: Literal["mirror"] = "mirror"
    from_: Annotated[tuple[str, ...], Field(alias="from", min_length=1)]
    create: bool = False
    tables: dict[str, str] = {}
    """source table → target table, where the names differ"""
    on_constraint: Annotated[Literal["stop", "park"], Field(alias="on.constraint")] = "stop"
    max_rows: Annotated[int, Field(alias="cut.max.rows", ge=1)] = 200_000
    checkpoint: Path | None = None
    spark: Spark = Spark()


class Pipeline(_Part):
    """The whole file."""

    name: Name
    kafka: dict[str, str]
    registry: Registry | None = None
    sites: Annotated[tuple[Site, ...], Field(min_length=1)]
    sources: tuple[Source, ...] = ()
    sinks: tuple[Sink, ...] = ()
    state_dir: Annotated[Path | None, Field(alias="state.dir")] = None

    @field_validator("kafka", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Pipeline:
        if "bootstrap.servers" not in self.kafka:
            raise ValueError("kafka: bootstrap.servers is missing")
        names = [site.name for site in self.sites]
        for kind, values in (
            ("sites: two sites have the name", names),
            ("sites: two sites have the id", [str(site.id) for site in self.sites]),
            ("sources: two sources have the name", [source.name for source in self.sources]),
            ("sinks: two sinks have the name", [sink.name for sink in self.sinks]),
        ):
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ValueError(f"{kind} {min(twice)!r}")
        placed = [(part.name, part.site) for part in self.sources] + [(part.name, part.site) for part in self.sinks]
        for name, site in placed:
            if site not in names:
                raise ValueError(f"{name}: site {site!r} is not one of the sites{_nearest(site, names)}")
        streams = [self.stream(source) for source in self.sources]
        for sink in self.sinks:
            for stream in sink.from_:
                if stream not in streams:
                    raise ValueError(f"{sink.name}: no source makes the stream {stream!r}{_nearest(stream, streams)}")
        return self

    def stream(self, source: Source) -> str:
        """Return the name of a source's stream: `site.source`."""
        return f"{source.site}.{source.name}"

    def prefix(self, source: Source) -> str:
        """Return the topic prefix of a source."""
        return source.prefix or f"{self.name}.{source.site}.{source.name}"

    def site_id(self, name: str) -> int:
        """Return the number of a site."""
        return next(site.id for site in self.sites if site.name == name)

    def source(self, name: str) -> Source:
        """Return a source by its name or its stream's.

        Raises:
            ConfigError: if there is none.
        """
        for source in self.sources:
            if name in (source.name, self.stream(source)):
                return source
        raise ConfigError(f"no source {name!r}{_nearest(name, [s.name for s in self.sources])}", where="sources")

    def sink(self, name: str) -> Sink:
        """Return a sink by its name.

        Raises:
            ConfigError: if there is none.
        """
        for sink in self.sinks:
            if sink.name == name:
                return sink
        raise ConfigError(f"no sink {name!r}{_nearest(name, [s.name for s in self.sinks])}", where="sinks")


def load(path: Path) -> Pipeline:
    """Read and check a pipeline file.

    Raises:
        ConfigError: with the path inside the file and, for a misspelt key, the nearest known one.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=str(path)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError("not valid YAML", where=f"{path}{line}") from None
    if not isinstance(raw, dict):
        raise ConfigError("the file must be a mapping with name, kafka, sites, sources and sinks", where=str(path))
    filled = _fill(raw, path.parent, "")
    try:
        pipeline = Pipeline.model_validate(filled)
    except ValidationError as error:
        raise _explain(error, path) from None
    if pipeline.state_dir is None:
        pipeline = pipeline.model_copy(update={"state_dir": path.resolve().parent / ".anabranch" / pipeline.name})
    return pipeline


def _fill(value: Any, base: Path, where: str) -> Any:
    """Replace the references in every string."""
    if isinstance(value, dict):
        return {key: _fill(item, base, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, base, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _secret(match[1], match[2], base, where), value)
    return value


def _secret(kind: str, name: str, base: Path, where: str) -> str:
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(f"the environment has no variable {name}", where=where, advice=f"export {name}=…")
        return os.environ[name]
    try:
        return (base / name).read_text().rstrip("\n")
    except OSError as error:
        raise ConfigError(f"cannot read the file {name}: {error.strerror}", where=where) from None


def _explain(error: ValidationError, path: Path) -> ConfigError:
    """Turn pydantic's first error into ours; the input itself is never shown."""
    # A misspelt key comes with the message that the right one is missing: the first says more.
    found = error.errors(include_input=False, include_url=False)
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    where = ".".join(str(part) for part in first["loc"])
    advice = f"see {path}"
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        return ConfigError(f"unknown key{_nearest(str(first['loc'][-1]), known)}", where=where, advice=advice)
    return ConfigError(first["msg"].removeprefix("Value error, "), where=where or str(path), advice=advice)


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are known at a place in the file."""
    parts: dict[str, type[BaseModel]] = {
        "sites": Site,
        "sources": Source,
        "sinks": Sink,
        "registry": Registry,
        "snapshot": Snapshot,
        "topics": Topics,
        "spark": Spark,
    }
    names = [part for part in loc if isinstance(part, str)]
    model = parts[names[-1]] if names else Pipeline
    return [field.alias or name for name, field in model.model_fields.items()]


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}" if known else ""
