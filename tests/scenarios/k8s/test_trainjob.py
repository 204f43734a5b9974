"""A TrainJob under the real controllers of Kubeflow, JobSet and Kueue: faults, and a suspension."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.launcher.command import launch
from tests.scenarios.k8s.conftest import wait_until
from tests.scenarios.k8s.test_pods import NAMESPACE, RUN_S, Pods, check_whole
from tests.scenarios.recovery.runs import FaultOutcome, check_no_step_lost

QUEUES = f"""
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {{name: any}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {{name: all}}
spec:
  namespaceSelector: {{}}
  resourceGroups:
    - coveredResources: [memory]
      flavors: [{{name: any, resources: [{{name: memory, nominalQuota: 100Gi}}]}}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {{name: team, namespace: {NAMESPACE}}}
spec: {{clusterQueue: all}}
"""
OBJECTS = "trainjobs,trainingruntimes,jobsets,jobs,pods,services,networkpolicies,secrets"


class TrainJobs(Pods):
    """Runs as TrainJobs of two pods."""

    kind = "trainjob"

    def kill_worker(self, run: str, pod: str) -> None:
        """Kill the worker of a pod as the kernel does that is out of memory."""
        node = pod.partition("/")[2].rpartition("-")[0]
        started = [each for each in self.events(run) if each.event == "worker_started"]
        *_, pid = (each.fields["pid"] for each in started if each.node == node)
        self.ask("exec", pod, "--container=node", "--", "kill", "-9", str(pid))

    def wait_for_step(self, run: str, step: int) -> None:
        wait_until(lambda: any(each >= step for each in self.steps(run)), limit_s=RUN_S)

    def wait_for_pods(self, run: str, num_pods: int) -> None:
        wait_until(lambda: len(self.names(run)) == num_pods, limit_s=RUN_S)

    def stop_queue(self, policy: str) -> None:
        change = json.dumps({"spec": {"stopPolicy": policy}})
        self.ask("patch", "clusterqueue", "all", "--type=merge", f"--patch={change}")

    def progress(self, run: str) -> dict[str, str]:
        """Return what the TrainJob's status says of the run's steps."""
        told = json.loads(self.ask("get", "trainjob", run, "--output=json"))
        found = told["status"]["trainerStatus"]
        values = {each["name"]: each["value"] for each in found["metrics"]}
        return values | {"percent": str(found["progressPercentage"])}

    def told(self, *words: str) -> str:
        """Return what the launcher says of a run."""
        done = launch(*words, folder=self._folder)
        assert done.status == 0, done.err
        return done.out


@pytest.fixture
def runs(kube_with_trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJobs:
    monkeypatch.setenv("KUBECONFIG", str(kube_with_trainer))
    return TrainJobs(kube_with_trainer, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
def test_a_trainjob_goes_on_through_faults_and_through_a_suspension(runs: TrainJobs) -> None:
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    runs.submit("calm")
    undisturbed = runs.wait_for_end("calm")
    assert {"percent": "100", "step": str(1 + runs.steps("calm")[-1])}.items() <= runs.progress(
        "calm"
    ).items()

    runs.submit("faults")
    killed, deleted = sorted(chance.sample(range(3, 60), 2))
    runs.wait_for_step("faults", killed)
    victim = chance.choice(sorted(runs.names("faults")))
    runs.kill_worker("faults", victim)
    runs.wait_for_step("faults", max(deleted, killed + 10))
    gone = chance.choice(sorted(runs.names("faults")))
    runs.ask("delete", gone, "--wait=false")
    sys.stdout.write(f"seed {seed}: {victim} after {killed}, {gone} after {deleted}\n")
    runs.wait_for_step("faults", max(deleted, killed + 10) + 10)
    runs.drain("faults")
    assert "faults: running" in runs.told("status", "runs/faults")
    _check(runs, "faults", undisturbed)
    assert "faults: succeeded" in runs.told("status", "runs/faults")
    assert "faults-node-0-0" in runs.told("logs", "runs/faults")

    # Kueue takes all pods away, and gives them back.
    runs.ask("apply", "--filename=-", text=QUEUES)
    runs.submit("queued", "cluster.queue=team")
    held = chance.randrange(3, 60)
    runs.wait_for_step("queued", held)
    runs.stop_queue("HoldAndDrain")
    wait_until(lambda: not runs.names("queued"), limit_s=RUN_S)
    sys.stdout.write(f"suspended after step {held}, at {runs.steps('queued')[-1]}\n")
    assert "queued: it is suspended" in runs.told("status", "runs/queued")
    runs.stop_queue("None")
    _check(runs, "queued", undisturbed)

    runs.submit("cancelled")
    runs.wait_for_step("cancelled", 1)
    runs.told("cancel", "runs/cancelled")
    for name in ("calm", "faults", "queued", "cancelled"):
        runs.told("clean", f"runs/{name}")
    wait_until(lambda: not runs.ask("get", OBJECTS, "--output=name").split(), limit_s=RUN_S)


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
def test_an_elastic_trainjob_changes_its_size_and_keeps_its_bits(runs: TrainJobs) -> None:
    submit = partial(runs.submit, recipe="tiny_elastic", num_steps=300)
    submit("steady", "resilience.elastic.nodes_max=3")
    undisturbed = runs.wait_for_end("steady")

    submit("sized", "resilience.elastic.nodes_max=3")
    runs.wait_for_step("sized", 10)
    for num_nodes in (3, 1, 2):
        runs.told("scale", "runs/sized", f"nodes={num_nodes}", "--wait")
        runs.wait_for_pods("sized", num_nodes)
    outcome = runs.wait_for_end("sized")

    check_no_step_lost(outcome.events)
    assert outcome.bits() == undisturbed.bits()
    assert outcome.digests() == undisturbed.digests()
    assert outcome.weights() == undisturbed.weights()
    opened = [each.fields["world_size"] for each in outcome.named("generation_opened")]
    assert opened == [2, 3, 1, 2]
    runs.told("clean", "runs/sized")
    runs.told("clean", "runs/steady")
    wait_until(lambda: not runs.ask("get", OBJECTS, "--output=name").split(), limit_s=RUN_S)


def _check(runs: TrainJobs, name: str, undisturbed: FaultOutcome) -> None:
    """The same of a run that has kept its name all the time."""
    outcome = check_whole(runs, name, undisturbed)
    (start,) = {str(each.fields["start"]) for each in outcome.named("agent_started")}
    sys.stdout.write(
        f"{name}: {len(outcome.named('agent_started'))} agents of the one run {start}\n"
    )
