import dagster as dg

#: No deps on purpose: served -> sampled -> trained -> served is a cycle, and Dagster's graphs have none.
#: The sensor report_served closes the loop by its event instead.
served_policy = dg.AssetSpec(
    "served_policy",
    group_name="serving",
    kinds={"sglang"},
    description="One event for each policy version that an inference server reports as loaded.",
)
