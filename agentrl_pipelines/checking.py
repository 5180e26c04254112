"""One asset check definition for each entry of quality.CHECKS, computed per partition from the documents."""

from collections.abc import Awaitable, Callable

import dagster as dg

from agentrl_pipelines.quality import CHECKS, Finding
from agentrl_pipelines.reporting import SEVERITIES
from agentrl_pipelines.resources import Stores
from agentrl_runtime.storage import ObjectStore

#: From a partition key to the findings of all checks of the asset.
Examine = Callable[[str, ObjectStore], Awaitable[list[Finding]]]


def result_of(finding: Finding) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name=finding.check,
        passed=finding.passed,
        severity=SEVERITIES[finding.severity],
        description=finding.description,
        metadata=finding.metadata,
    )


def checks_of(
    asset: str, partitions_def: dg.DynamicPartitionsDefinition, examine: Examine
) -> list[dg.AssetChecksDefinition]:
    """The asset's checks; the same findings accompany what the loops report."""

    def one(name: str, description: str) -> dg.AssetChecksDefinition:
        @dg.asset_check(asset=asset, name=name, description=description, partitions_def=partitions_def)
        def check(context: dg.AssetCheckExecutionContext, stores: Stores) -> dg.AssetCheckResult:
            findings = stores.call(lambda store: examine(context.partition_key, store))
            return result_of(next(finding for finding in findings if finding.check == name))

        return check

    return [one(check.name, check.description) for check in CHECKS if check.asset == asset]
