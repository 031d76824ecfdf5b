"""What `dg scaffold defs sluice.dagster.FeedsComponent` writes: defs.yaml, and a first feed if there is none yet."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from pydantic import BaseModel, Field


class FeedsScaffoldParams(BaseModel):
    """What may be said when a component is scaffolded."""

    topic: str | None = Field(default=None, description="A topic in Kafka, for a first feed file of that name.")


FEED = """\
# One feed: a topic of Kafka, landed as Parquet, hour by hour. `sluice feeds check` says whether it is right;
# `sluice init` proposes types for its columns from what lies in the topic.
kafka:
  bootstrap: ${{KAFKA_BOOTSTRAP}}
topics: {topic}
start: earliest
"""


class FeedsScaffolder(dg.Scaffolder[FeedsScaffoldParams]):
    """Writes defs.yaml, and `feeds/` in the project's folder with a first feed where a topic is named."""

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
