"""Files of `dg scaffold defs sluice.dagster.FeedsComponent`: defs.yaml, and a first feed if it does not exist."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from pydantic import BaseModel, Field


class FeedsScaffoldParams(BaseModel):
    """Options of the scaffold command."""

    topic: str | None = Field(default=None, description="A Kafka topic: writes a first feed file for it.")


FEED = """\
# A feed: a Kafka topic, landed as Parquet, hour by hour. `sluice feeds check` validates it;
# `sluice init` proposes column types from a sample of the topic.
kafka:
  bootstrap: ${{KAFKA_BOOTSTRAP}}
topics: {topic}
start: earliest
"""


class FeedsScaffolder(dg.Scaffolder[FeedsScaffoldParams]):
    """Write defs.yaml, and `feeds/` in the project's folder, with a first feed for the option `topic`."""

    @classmethod
    def get_scaffold_params(cls) -> type[FeedsScaffoldParams]:
        return FeedsScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[FeedsScaffoldParams]) -> None:
        root = request.project_root or request.target_path
        feeds = Path(root) / "feeds"
        feeds.mkdir(parents=True, exist_ok=True)
        self._write_feed(feeds, request.params)
        where = {"feeds": "{{ context.project_root }}/feeds"} if request.project_root else {"feeds": "feeds"}
        dg.scaffold_component(request=request, yaml_attributes=where)

    def _write_feed(self, feeds: Path, params: FeedsScaffoldParams | None) -> None:
        topic = params.topic if params else None
        if topic and not (path := feeds / f"{topic.replace('.', '_')}.yaml").exists():
            path.write_text(FEED.format(topic=topic))
