import dagster as dg

from agentrl_pipelines.checking import checks_of
from agentrl_pipelines.evidence import the, version_evidence
from agentrl_pipelines.partitions import POLICY_VERSIONS
from agentrl_pipelines.quality import Finding, check_version
from agentrl_runtime.databases import PolicyVersion
from agentrl_runtime.storage import ObjectStore


async def examine(version_id: str, _: ObjectStore) -> list[Finding]:
    return check_version(await version_evidence(await the(PolicyVersion, version_id, "policy version")))


@dg.definitions
def defs() -> dg.Definitions:
    return dg.Definitions(asset_checks=checks_of("checkpoint", POLICY_VERSIONS, examine))
