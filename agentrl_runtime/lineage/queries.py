"""The questions lineage answers: where something came from, where it went, and what it is."""

from agentrl_runtime.lineage.detail import RecordDetail, TokenDetail, show_record, worst_records
from agentrl_runtime.lineage.downstream import impact
from agentrl_runtime.lineage.reading import resolve
from agentrl_runtime.lineage.upstream import DEFAULT_LIMIT, trace

__all__ = [
    "DEFAULT_LIMIT",
    "RecordDetail",
    "TokenDetail",
    "impact",
    "resolve",
    "show_record",
    "trace",
    "worst_records",
]
