import dagster as dg

from agentrl_pipelines.checking import checks_of
from agentrl_pipelines.evidence import eval_evidence, the
from agentrl_pipelines.partitions import POLICY_VERSIONS
from agentrl_pipelines.quality import Finding, check_eval
from agentrl_runtime.databases import EvalReport
from agentrl_runtime.ids import eval_batch_id
from agentrl_runtime.storage import ObjectStore


async def examine(version_id: str, _: ObjectStore) -> list[Finding]:
    return check_eval(await eval_evidence(await the(EvalReport, eval_batch_id(version_id), "evaluation")))


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(asset_checks=checks_of("eval_report", POLICY_VERSIONS, examine))
