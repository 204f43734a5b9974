"""A Job with pods that run, as it is rendered: what a deleted pod costs."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.clusters.k8s.values import JOB_LABEL
from resilience.events import Event, EventReader
from tests.launcher.command import launch
from tests.scenarios.k8s.conftest import kubectl, wait_until
from tests.scenarios.recovery.runs import FaultOutcome, check_no_step_lost, check_same_bits

NUM_STEPS = 100
STEPS_BEFORE = 40
"""A pod is deleted after one of these, since ranks go on for two seconds and more after that."""
RUN_S = 600.0
"""How long a run of so many steps may take on a machine that others use as well."""
CLAIM = "results"
NAMESPACE = "runs"
OBJECTS = """
apiVersion: v1
kind: Namespace
metadata:
  name: {namespace}
  labels: {{pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {claim}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  hostPath: {{path: {folder}}}
  claimRef: {{namespace: {namespace}, name: {claim}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {claim}, namespace: {namespace}}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  resources: {{requests: {{storage: 1Gi}}}}
  volumeName: {claim}
"""


KNOCK = """
import socket, sys
for port in (9201, 29500):
    try:
        socket.create_connection((sys.argv[1], port), 5)
    except OSError as error:
        print(port, error.strerror)
"""
STRANGER = ("--image=localhost/host:1", "--restart=Never", "--attach", "--rm", "--quiet")


class Pods:
    """Runs of two pods on a cluster, and the folder of their claim."""

    kind = "job"

    def __init__(self, config: Path, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._claim = folder / "claim"
        self._claim.mkdir()
        # Kubernetes gives a folder of the node to no fs_group.
        self._claim.chmod(0o777)
        own = {"claim": CLAIM, "folder": self._claim, "namespace": NAMESPACE}
        self.ask("apply", "--filename=-", text=OBJECTS.format(**own))

    def ask(self, *words: str, text: str | None = None, namespace: str = NAMESPACE) -> str:
        done = kubectl(self._config, f"--namespace={namespace}", *words, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(
        self,
        name: str,
        *more: str,
        recipe: str = "tiny_checkpointless",
        num_steps: int = NUM_STEPS,
    ) -> None:
        done = launch(
            f"recipe=llama/llama3_{recipe}",
            "cluster=k8s",
            "cluster.image=localhost/host:1",
            f"cluster.namespace={NAMESPACE}",
            f"cluster.volume_claims=[{{claim_name: {CLAIM}, mount_path: /results}}]",
            "cluster.run_path=/results",
            "trainer.num_nodes=2",
            "trainer.num_devices=1",
            f"trainer.max_steps={num_steps}",
            "trainer.optimizer.warmup_steps=5",
            "resilience.faults=null",
            f"run.name={name}",
            "action=submit",
            f"cluster.job_kind={self.kind}",
            *more,
            folder=self._folder,
        )
        assert done.status == 0, done.err

    def names(self, run: str) -> list[str]:
        return self.ask("get", "pods", f"--selector={JOB_LABEL}={run}", "--output=name").split()

    def knock(self, run: str) -> list[str]:
        """Connect from a pod of another namespace, on n2, to daemon and agent on n1."""
        first = "--field-selector=spec.nodeName=n1", "--output=jsonpath={.items[0].status.podIP}"
        address = self.ask("get", "pods", f"--selector={JOB_LABEL}={run}", *first)
        place = '--overrides={"spec": {"nodeName": "n2"}}'
        words = ("--command", "--", "python3", "-c", KNOCK, address)
        ends = self.ask("run", "stranger", *STRANGER, place, *words, namespace="default")
        return ends.splitlines()

    def drain(self, run: str) -> None:
        """Empty n2 of the run's pods as before its maintenance, and then give the node back."""
        own = (f"--pod-selector={JOB_LABEL}={run}", "--delete-emptydir-data", "--timeout=50s")
        sys.stdout.write(self.ask("drain", "n2", *own))
        nodes = "--output=jsonpath={.items[*].spec.nodeName}"
        asked = ("get", "pods", f"--selector={JOB_LABEL}={run}", nodes)
        wait_until(lambda: self.ask(*asked).split() == ["n1", "n1"], limit_s=RUN_S)
        self.ask("uncordon", "n2")

    def events(self, run: str) -> Sequence[Event]:
        return EventReader(self._claim / run / "events.jsonl").read_new()

    def steps(self, run: str) -> list[int]:
        """Return the steps that were taken, without a last one before a fault, told again."""
        steps = (each for each in self.events(run) if each.event == "step")
        return [each.step or 0 for each in steps if each.fields.get("duration_s") is not None]

    def wait_for_end(self, run: str) -> FaultOutcome:
        def ended() -> list[str]:
            status = json.loads(self.ask("get", f"{self.kind}/{run}", "--output=json")).get(
                "status", {}
            )
            types = [each["type"] for each in status.get("conditions") or ()]
            return [each for each in types if each in ("Complete", "Failed")]

        wait_until(ended, limit_s=RUN_S)
        assert ended() == ["Complete"], launch("logs", run, folder=self._folder).out
        return FaultOutcome(self._claim / run, [])


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_a_deleted_pod_is_replaced_and_no_step_is_lost(
    kube_with_pods: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    monkeypatch.setenv("KUBECONFIG", str(kube_with_pods))
    pods = Pods(kube_with_pods, tmp_path)
    pods.submit("calm")
    undisturbed = pods.wait_for_end("calm")

    pods.submit("deleted")
    step = chance.randrange(STEPS_BEFORE)
    wait_until(lambda: any(each >= step for each in pods.steps("deleted")), limit_s=RUN_S)
    assert pods.knock("deleted") == ["9201 Connection refused", "29500 Connection refused"]
    pod = chance.choice(sorted(pods.names("deleted")))
    sys.stdout.write(f"{pod} is deleted after step {step}\n")
    pods.ask("delete", pod, "--wait=false")
    assert len(check_whole(pods, "deleted", undisturbed).named("agent_started")) == 3

    pods.submit("drained")
    wait_until(lambda: any(each >= step for each in pods.steps("drained")), limit_s=RUN_S)
    pods.drain("drained")
    assert len(check_whole(pods, "drained", undisturbed).named("agent_started")) == 3


def check_whole(pods: Pods, name: str, undisturbed: FaultOutcome) -> FaultOutcome:
    """See a run end with the bits of the undisturbed one, and no step that was taken twice."""
    outcome = pods.wait_for_end(name)
    # A pod may leave before it has told of the last step, which its successor then does.
    taken = pods.steps(name)
    assert taken == sorted(set(taken))
    check_no_step_lost(outcome.events)
    check_same_bits(outcome, undisturbed)
    return outcome
