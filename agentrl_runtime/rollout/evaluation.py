"""Greedy evaluation of a policy version on unseen tasks."""

from agentrl_runtime import ids
from agentrl_runtime.databases import EvalReport, PolicyVersion
from agentrl_runtime.rollout.batches import ensure_eval_batch, task_ids_of
from agentrl_runtime.rollout.engine import RolloutEngine
from agentrl_runtime.rollout.queue import records_of


async def evaluate(engine: RolloutEngine, version: PolicyVersion, dataset: str) -> EvalReport:
    """Attempt each task of `dataset` once at temperature 0; the server must serve `version` throughout.

    A version that has its report keeps it.
    """
    report_id = ids.eval_batch_id(version.id)
    known = await EvalReport.get(report_id)
    if known is not None:
        return known
    config = engine.session.config
    batch = await ensure_eval_batch(config, version.id, version.number, dataset, await task_ids_of(dataset))
    batch = await engine.complete(batch)
    records = await records_of(batch.id)
    scores = [record.score if record.score is not None else 0.0 for record in records]
    report = EvalReport(
        id=report_id,
        run_id=version.run_id,
        version_id=version.id,
        dataset=dataset,
        records=len(records),
        mean_score=sum(scores) / len(scores) if scores else 0.0,
        accuracy=sum(score >= 1.0 for score in scores) / len(scores) if scores else 0.0,
        failed=sum(record.status == "failed" for record in records),
        seconds=float(batch.stats["seconds"]),
    )
    await report.insert()
    return report
