"""The three dynamic partitions. A partition key is the id of the document it stands for."""

import dagster as dg

DATASETS = dg.DynamicPartitionsDefinition(name="dataset")
TRAJECTORY_BATCHES = dg.DynamicPartitionsDefinition(name="trajectory_batch")
POLICY_VERSIONS = dg.DynamicPartitionsDefinition(name="policy_version")
