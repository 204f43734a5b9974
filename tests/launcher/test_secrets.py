"""What is recognised as a secret, and what only sounds like one: tables of both sides."""

from __future__ import annotations

import time

import pytest

from launcher.paths import shipped_folder
from launcher.secrets import NOT_SHOWN, held_secrets, masked
from tests.launcher.shipped import CLUSTERS, RECIPES, shipped_job

TINY = "llama/llama3_tiny_pretrain"
# Of a pre_script, a variable or any other text.
SECRET_TEXTS = [
    "docker login -p dckr_oat_CANARY0123456789abcdef",
    "Endpoint=sb://h/;SharedAccessKey=CANARY012345",
    "pcsk_CANARY0123456789abcdef",
    "data: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQCANARY",
    "curl -H 'Authorization: ApiKey CANARY8f2a41bc'",
    "curl -H 'authorization: CANARY8f2a41bc'",
    "clientSecret=CANARY",
    "export HF_TOKEN=abc123",
    'export WANDB_API_KEY="CANARY"',
    "PGPASSWORD=x9 psql",
    'curl -H "Authorization: Bearer CANARY" x',
    "curl -H 'Authorization: Basic Q0FOQVJZ' x",
    "tool --token CANARY",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "--token=X",
    "redis://:pw@host",
    "https://user:pa:ss@host/x",
    "https://0123456789abcdef0123@github.com/x",
    "git clone https://oauth2:CANARY@gitlab.com/x.git",
    "https://a.blob.core.windows.net/c?sv=1&sig=CANARY%3D",
    "https://b.s3.amazonaws.com/x?X-Amz-Algorithm=A&X-Amz-Signature=00ff",
    "https://h/x?token=CANARY",
    'curl -H "X-Api-Key: CANARY"',
    'curl -H "PRIVATE-TOKEN: CANARY"',
    'echo \'{"password": "CANARY"}\'',
    "export MY_CREDS=a:b",
    "the runner has glpat-CANARY0123456789abcd",
    "xoxb-0123456789-CANARY0123456789",
    "xapp-1-A0123456789-CANARY",
    "https://hooks.slack.com/services/T01234567/B01234567/CANARY",
    "npm_CANARY0123456789CANARY0123456789ab",
    "pypi-AgEIcHlwaS5vcmcCANARY",
    "AIzaCANARY0123456789CANARY0123456789abc",
    "ya29.CANARY0123456789CANARY",
    "nvapi-CANARY0123456789CANARY",
    "hf_CANARY0123456789CANARY",
    "ghp_CANARY0123456789CANARY0123456789",
    "AKIACANARYCANARYCANA",
    "sk-proj-CANARY0123456789CANARY",
    "sk-ant-api03-CANARY0123456789",
    "sk_live_CANARY0123456789",
    "whsec_CANARY0123456789",
    "dckr_pat_CANARY0123456789CANARY",
    "hvs.CANARY0123456789CANARY",
    "dapi0123456789abcdef0123456789abcdef",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    "Bearer CANARY0123456789",
    "WANDB_KEY=CANARY",
    "export SIGNING_KEY=CANARY",
    "tool --signing-key CANARY",
    "tool --password hunter2",
]
HARMLESS_TEXTS = [
    "pip install sk-learn-contrib-package-name-long",
    "pip --index-url https://pypi-public-mirror-internal-host/simple",
    "caBundle: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUJ",
    "squ_of_the_team_has_a_long_name",
    "convert --eos-token END --pad_token=PAD unk_token=unk",
    "Authorization: required",
    "export TOKENIZERS_PARALLELISM=false",
    "export HF_TOKEN=$(cat /run/secrets/hf)",
    'export HF_TOKEN="$HF_TOKEN"',
    "export HF_TOKEN=`cat /x`",
    "export HF_TOKEN=${HF_TOKEN:-}",
    "export HF_TOKEN=",
    "unset HF_TOKEN",
    "--max-tokens 5",
    "num_experts_per_token=4",
    "export HF_TOKEN_PATH=/run/secrets/hf",
    "export MEMORYD_TOKEN_FILE=/x/token",
    "tool --token-file /x",
    'tool --token "$HF_TOKEN"',
    "tool --password-stdin",
    "docker login --username a --password-stdin </run/secrets/x",
    "export GOOGLE_APPLICATION_CREDENTIALS=/secrets/gcp.json",
    "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
    "use_auth_token=True",
    "pad_token=<pad>",
    'test -n "$HF_TOKEN"',
    '[ "$TOKEN" = x ]',
    'curl -H "Authorization: Bearer $HF_TOKEN" x',
    "https://git@github.com/x",
    "abfss://container@account.dfs.core.windows.net/x",
    "https://user:$TOKEN@host/x",
    "https://$TOKEN@github.com/x",
    "https://h/x?email=somebody-long@example.com",
    "registry.example.com/image@sha256:0000000000000000000000000000000000000000000000000000000000000000",
    "tokens: 5",
    "a token: the unit of text",
    "password-less",
    "cd $PWD",
    "export OLD=$OLDPWD",
    "PYTHONPATH=/x/secrets",
    "https://h/x?signal=1&design=2",
    "https://h:8080/a@b",
    "export TOKEN_DIR=/x",
    "tool --token",
    "trained on 15T tokens; see the paper",
    "python -m x --tokenizer-name meta/llama --seed 1",
    "export PS1='$(pwd)'",
    'tokenizer(pad_token="</s>")',
    "use --token here, or --password with a file",
    "the option --api-key is read from the environment; see --token below",
    "npm_config_registry_of_the_team_alone",
    "the bearer of responsibilities; Bearer authentication",
    "Bearer $HF_TOKEN",
    "partition_key=a; PUBLIC_KEY=b",
    "mask-languages sk-SK",
]
# Where a value stands, and the value.
SECRET_NAMES = [
    ("env.PGPASS", "x"), ("env.DB_PWD", "x"), ("env.MY_CREDS", "x"), ("env.HF_TOKEN_PATH", "x"),
    ("cluster.labels.token", "X"), ("cluster.annotations.api-key", "X"),
    ("cluster.labels.example.com/api-key", "X"), ("env.OPTS", '"--token=X"'), ("env.WANDB_KEY",
    "X"), ("env.SIGNING_KEY", "X"), ("env.SOME_VENDORS_KEY", "X"), ("env.OPTS", "--token=X"),
    ("env.GITHUB_PAT", "X"), ("env.accessToken", "X"), ("env.REDISCLI_AUTH", "X"),
    ("env.AZURE_STORAGE_CONNECTION_STRING", "X"),
]  # fmt: skip
HARMLESS_NAMES = [
    ("env.PUBLIC_KEY", "x"), ("env.SORT_KEY", "x"), ("env.KEY_FILE", "/x"), ("env.PWD", "/x"),
    ("env.OLDPWD", "/x"), ("env.HF_TOKEN_PATH", "/x"), ("env.AWS_WEB_IDENTITY_TOKEN_FILE",
    "/var/x"), ("env.GOOGLE_APPLICATION_CREDENTIALS", "/x.json"),
    ("env.HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("env.TOKENIZERS_PARALLELISM", "false"),
    ("env.MAX_TOKENS", "9"), ("env.COMPASS", "x"), ("env.TWO_PASS_MODE", "x"), ("env.PASSIVE", "x"),
    ("env.FIRST_PASS", "x"), ("env.EOS_TOKEN", "x"), ("env.PAD_TOKEN", "x"), ("env.TOKEN_LIMIT",
    "x"), ("env.maxTokens", "x"), ("cluster.labels.token-bucket", "x"), ("cluster.labels.app",
    "secretary"), ("cluster.annotations.vault.hashicorp.com/agent-inject-secret-token",
    "secret/data/db"), ("cluster.annotations.example.com/use-token", "true"),
    ("cluster.annotations.secret-name", "x"),
]  # fmt: skip


def place_of(key: str) -> tuple[str, ...]:
    return tuple(key.split(".", 2 if key.startswith("cluster.") else 1))


@pytest.mark.parametrize("text", SECRET_TEXTS)
@pytest.mark.parametrize("key", ["cluster.pre_script", "env.NOTE", "cluster.annotations.note"])
def test_text_that_holds_a_secret_is_refused_and_masked(text: str, key: str) -> None:
    told = list(held_secrets(f"set -e\n{text}\n", place_of(key)))

    assert [each.partition(" (not shown); ")[0] for each in told] == [f"{key} looks like a secret"]
    assert "CANARY" not in told[0]
    assert masked(text, place_of(key)) == NOT_SHOWN


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_harmless_text_passes(text: str) -> None:
    assert list(held_secrets(f"set -e\n{text}\n", ("cluster", "pre_script"))) == []


@pytest.mark.parametrize(("key", "value"), SECRET_NAMES)
def test_value_whose_name_says_that_it_is_a_secret_is_refused(key: str, value: str) -> None:
    (told,) = held_secrets(value, place_of(key))

    assert told.startswith(f"{key} ")
    assert masked(value, place_of(key)) == NOT_SHOWN


@pytest.mark.parametrize(("key", "value"), HARMLESS_NAMES)
def test_value_whose_name_only_sounds_like_a_secrets_passes(key: str, value: str) -> None:
    assert list(held_secrets(value, place_of(key))) == []


@pytest.mark.parametrize("words", [
    ["curl", "--token", "CANARY"], ["-H", "Authorization: Bearer", "CANARY"],
    ["glpat-CANARY", "0123456789abcdef"], [{"a": ["--password", "hunter2"]}, "x"],
])  # fmt: skip
def test_a_secret_that_is_spread_over_a_list_is_refused(words: list[object]) -> None:
    (told,) = held_secrets({"probes": {"command": words}}, ("cluster",))

    assert told.startswith("cluster.probes.command")
    assert "CANARY" not in told


@pytest.mark.parametrize("words", [
    ["tool", "--token", "$HF_TOKEN"], ["--token-file", "/x"], ["use", "--token", "here"], [1, None],
    ["a", "token"], [["--token"], ["CANARY"]],
])  # fmt: skip
def test_a_list_without_a_secret_passes(words: list[object]) -> None:
    assert list(held_secrets(words, ("cluster", "modules"))) == []


@pytest.mark.parametrize("kind", CLUSTERS)
def test_shipped_recipes_hold_no_secret(kind: str) -> None:
    for recipe in RECIPES:
        assert list(held_secrets(shipped_job(recipe, kind).model_dump(mode="json"))) == []


def test_lines_of_what_is_shipped_are_harmless() -> None:
    """What people copy into a recipe or a profile of their own."""
    paths = [
        path for name in ("conf", "recipes") for path in (shipped_folder() / name).rglob("*.y*ml")
    ]
    lines = {line for path in paths for line in path.read_text("utf-8").splitlines()}

    assert [line for line in lines if list(held_secrets(line, ("cluster", "comment")))] == []


@pytest.mark.parametrize("part", [
    "a", "-", "--a", "a-", "'a", "'", "://a:", "https://", "token-", "?X-a", "eyJa.",
    "Authorization",
])  # fmt: skip
def test_long_text_is_looked_at_in_little_time(part: str) -> None:
    began = time.process_time()

    assert list(held_secrets(part * 5000, ("env", "A"))) == []

    assert time.process_time() - began < 2
