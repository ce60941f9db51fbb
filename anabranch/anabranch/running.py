"""Which processes make up a pipeline."""

from __future__ import annotations

from pathlib import Path

from anabranch.pipeline import Pipeline
from anabranch.supervise import Part, part_command


def pipeline_parts(pipeline: Pipeline, file: Path) -> list[Part]:
    """Return one part for every source and sink of the file."""
    sources = [
        Part("source", source.name, part_command("worker", file, "--source", source.name))
        for source in pipeline.sources
    ]
    sinks = [Part("sink", sink.name, part_command("sink", file, "--sink", sink.name)) for sink in pipeline.sinks]
    return [*sources, *sinks]
