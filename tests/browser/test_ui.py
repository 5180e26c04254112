"""The web UI as a person sees it: the asset graph and a partition page, without an error on them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from playwright.sync_api import Page, sync_playwright

from agentrl_pipelines.evidence import RecordLine
from agentrl_pipelines.metadata import SHARD_COLUMNS, record_table
from agentrl_pipelines.partitions import DATASETS, POLICY_VERSIONS, TRAJECTORY_BATCHES
from agentrl_pipelines.plots import learning_curve, markdown_picture, score_histogram
from agentrl_pipelines.server import DagsterServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
VERSIONS = 6

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


def _events() -> Iterator[tuple[dg.DynamicPartitionsDefinition | None, dg.AssetMaterialization]]:
    """What the loops report for a short run, with invented numbers."""
    yield DATASETS, dg.AssetMaterialization("task_dataset", partition="addition", metadata={"tasks": 4096})
    line = RecordLine("rec_0123456789abcdef01234567", "add-53-97", "53+97=", "051", "051", 1.0)
    for number in range(VERSIONS):
        reward = 0.5 + 0.07 * number
        batch, version = f"demo-1.b{number:05d}", f"demo-1.v{number:05d}"
        picture = markdown_picture(score_histogram([0.0] * 10 + [1.0] * (5 + number), title=batch), "scores")
        yield (
            TRAJECTORY_BATCHES,
            dg.AssetMaterialization(
                "trajectories",
                partition=batch,
                metadata={
                    "reward": reward,
                    "reward_histogram": dg.MetadataValue.md(picture),
                    "best": record_table([line]),
                },
            ),
        )
        yield (
            TRAJECTORY_BATCHES,
            dg.AssetMaterialization(
                "training_shard", partition=batch, metadata={"rows": 256, "dagster/column_schema": SHARD_COLUMNS}
            ),
        )
        curve = learning_curve([(n, 0.5 + 0.07 * n) for n in range(number + 1)], [], title=version)
        yield (
            POLICY_VERSIONS,
            dg.AssetMaterialization(
                "checkpoint",
                partition=version,
                metadata={"reward": reward, "reward_curve": dg.MetadataValue.md(markdown_picture(curve, "curve"))},
            ),
        )
    yield POLICY_VERSIONS, dg.AssetMaterialization("eval_report", partition=version, metadata={"accuracy": 0.88})
    yield None, dg.AssetMaterialization("served_policy", metadata={"policy_version": version})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterServer]:
    home: Path = tmp_path_factory.mktemp("ui")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(home))
        with DagsterServer(home, daemon=False) as running:
            with dg.DagsterInstance.from_config(str(running.folder)) as instance:
                for partitions_def, event in _events():
                    if partitions_def is not None and event.partition is not None:
                        instance.add_dynamic_partitions(str(partitions_def.name), [event.partition])
                    instance.report_runless_asset_event(event)
            yield running


@pytest.fixture(scope="module")
def page(server: DagsterServer) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1500, "height": 900})
        finally:
            browser.close()


def _visit(page: Page, address: str, texts: list[str]) -> list[str]:
    """Load the page, wait until all texts are shown, and return the errors of its console and requests."""
    errors: list[str] = []

    def note(text: str) -> None:
        # The UI of the release probes for things of the hosted product and of the browser that are not there.
        if not any(known in text for known in ("favicon", "ERR_INTERNET_DISCONNECTED", "net::ERR_NAME_NOT_RESOLVED")):
            errors.append(text)

    page.on("pageerror", lambda error: note(str(error)))
    page.on("console", lambda message: note(message.text) if message.type == "error" else None)
    page.on("response", lambda answer: note(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.goto(address, wait_until="domcontentloaded", timeout=120_000)
    for text in texts:
        page.get_by_text(text, exact=False).first.wait_for(state="visible", timeout=120_000)
    page.wait_for_timeout(4000)  # states of assets come after their names
    body = page.inner_text("body")
    for bad in ("Unexpected GraphQL error", "PythonError", "Error loading", "failed to load", "could not be loaded"):
        assert bad not in body, body
    return errors


def _picture(page: Page, name: str, tmp_path: Path) -> None:
    """Keep what was seen; AGENTRL_SCREENSHOTS names a folder to keep it for good."""
    folder = Path(os.environ.get("AGENTRL_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / f"{name}.png"))
    assert (folder / f"{name}.png").stat().st_size > 10_000


def test_the_asset_graph_shows_every_asset(server: DagsterServer, page: Page, tmp_path: Path) -> None:
    names = ["task_dataset", "trajectories", "training_shard", "checkpoint", "eval_report", "served_policy"]
    errors = _visit(page, server.graph, names)
    _picture(page, "asset-graph", tmp_path)
    assert errors == []


def test_a_partition_page_shows_its_metadata_and_curve(server: DagsterServer, page: Page, tmp_path: Path) -> None:
    version = f"demo-1.v{VERSIONS - 1:05d}"
    errors = _visit(page, server.link("checkpoint", version), [version, "reward_curve"])
    page.get_by_text("[Show Markdown]").first.click()
    page.locator('img[src^="data:image/png"]').first.wait_for(state="visible", timeout=60_000)
    _picture(page, "partition", tmp_path)
    assert errors == []
