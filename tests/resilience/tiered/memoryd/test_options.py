"""What the daemon's command line says, and how it is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.memoryd.__main__ import main
from resilience.tiered.memoryd.options import default_folder, parse_options
from resilience.tiered.placement import Node
from resilience.tiered.stores.folder import FolderSettings
from resilience.tiered.stores.s3 import S3Settings
from tests.tokens import TOKEN, write_token

BASE = ["--budget-mib", "1", "--node", "a"]
LISTEN = "--peer-listen 127.0.0.1:7000"
INSTEAD = f"{LISTEN} --peers-hold instead"
FOLDER, S3 = "--store folder:x", "--store s3://b"


def test_defaults_are_a_local_daemon_in_shared_memory() -> None:
    options = parse_options(["--budget-mib", "1"])

    assert options.folder == default_folder() == Path(f"/dev/shm/memoryd-{os.geteuid()}")
    assert (options.budget_bytes, options.http, options.local.token) == (1 << 20, None, "")
    assert options.local.own.name == options.local.own.domain != ""
    assert not options.remove_on_exit


def test_a_token_is_the_files_text(tmp_path: Path) -> None:
    write_token(tmp_path / "token", f"{TOKEN}\n")

    options = parse_options(["--budget-mib", "1", "--token-file", str(tmp_path / "token")])

    assert options.local.token == TOKEN


WRONG_WORDS = [
    ("--budget-mib -1", "'-1': Input should be greater"),
    ("--budget-mib 999999999", "is more than the .* MiB of"),
    (f"--dir {'x' * 100}", "--dir: 'x+' is too long; .* 107 bytes"),
    ("--http 9200", "--http: '9200' is not HOST:PORT"),
    ("--http h:x", "'h:x' is not HOST:PORT"),
    ("--http h:0", "'h:0' is not HOST:PORT"),
    ("--http h:65536", "'h:65536' is not HOST:PORT"),
    ("--http 0.0.0.0:1", "--http: '0.0.0.0' .* --token-file"),
    ("--http [::]:1", "'::' can be reached .* --token-file"),
    ("--http-open", "--http-open: allowed only with --http .* loopback"),
    ("--http 0.0.0.0:1 --token-file token --http-open", "allowed only with --http .* loopback"),
    ("--token-file gone", "--token-file: 'gone' cannot be read"),
    ("--token-file empty", "'empty' holds 0 characters; allowed for a token: 16 to"),
    ("--token-file large", "'large' holds 4097 characters; allowed"),
    ("--token-file binary", "'binary' cannot be read"),
    ("--peer b=h:1", "needs --peer-listen"),
    (f"{LISTEN} --peer b", "is no peer; want NAME=HOST:PORT"),
    (f"{LISTEN} --peer b=h:1;rack=2", "is no peer"),
    (f"{LISTEN} --peer b=h", "is not HOST:PORT"),
    (f"{LISTEN} --peer b=h:1 --peer b=h:1", "want each name once"),
    (f"{LISTEN} --peers-file none", "cannot be read"),
    (f"{LISTEN} --replicas -1", "'-1': Input should be greater"),
    (f"{LISTEN} --tls", "--tls: needs --token-file"),
    ("--tls --token-file token --http 0.0.0.0:1", "the HTTP door at '0.0.0.0' has no TLS"),
    ("--peer-listen 0.0.0.0:7000", "needs --token-file"),
    ("--peers-hold instead", "instead needs --peer-listen"),
    (f"{INSTEAD} --replicas 0", "0 is not allowed with --peers-hold instead"),
    (f"{INSTEAD} --domains-min 2", "2 is more than --replicas 1, .* 1 to 1 is allowed"),
    ("--store s3://", "neither folder:PATH nor s3://BUCKET"),
    ("--store /tmp", "'/tmp' is neither"),
    ("--store folder:", "'folder:' is neither"),
    ("--store-keep 1", "--store: has to be given with"),
    (f"{FOLDER} --store-path-style", "are of s3:// alone"),
    (f"{S3} --store-endpoint here", "'here': allowed: http://"),
    (f"{S3} --store-part-size-mib 1", "not within 5 and 5120"),
    (f"{S3} --store-every-s 1 --store-every-n-steps 1", "not allowed with --store-every-n-steps"),
    ("--idle-s nan", "--idle-s: 'nan': Input should be a finite"),
    ("--lease-s 1e7", "--lease-s: '1e7': at most 1e.06"),
    ("--budget-mib 1 --budget 1", "unrecognized arguments: --budget"),
    ("more", "unrecognized arguments: more"),
]


@pytest.mark.parametrize(("words", "message"), [("", "required: --budget-mib"), *WRONG_WORDS])
def test_wrong_options_end_with_status_2_and_one_message(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token(tmp_path / "empty", " \n")
    write_token(tmp_path / "large", "x" * 5000)
    write_token(tmp_path / "token")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    budget = [] if not words or words.startswith("--budget-mib") else ["--budget-mib", "1"]

    with pytest.raises(SystemExit) as caught:
        main([*budget, *words.split()])

    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    assert caught.value.code == 2
    assert re.search(message, line), line


def test_a_node_without_a_door_is_alone() -> None:
    assert parse_options(BASE).peers is None


def test_peers_are_named_one_by_one() -> None:
    words = ["--peer", "b=h:1", "--peer", "c=[::1]:2;domain=r;switch=s", "--replicas", "2"]
    peers = parse_options([*BASE, *LISTEN.split(), *words, "--domain", "q", "--switch", "t"]).peers

    assert peers is not None
    assert peers.own == Node(name="a", domain="q", switch="t")
    assert peers.listen == ("127.0.0.1", 7000)
    assert peers.peers == (
        Node(name="b", domain="", address="h:1"),
        Node(name="c", domain="r", switch="s", address="[::1]:2"),
    )
    assert (peers.replicas, peers.gone_s, peers.tls) == (2, 10.0, None)


def test_a_file_names_all_nodes(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text("# all nodes\na=h:1\n\nb=h:2;domain=r  # the other\n")
    peers = parse_options([*BASE, *LISTEN.split(), "--peers-file", str(file)]).peers

    assert peers is not None
    assert peers.peers == (Node(name="b", domain="r", address="h:2"),)


def test_options_say_how_many_keep_a_shard_and_in_how_many_domains() -> None:
    for replicas, domains_min in ((1, 1), (2, 2), (3, 2)):
        options = parse_options([*BASE, *INSTEAD.split(), "--replicas", str(replicas)])
        settings = options.kept.settings
        assert options.peers is not None
        assert options.peers.holds_instead
        assert (settings.keepers, settings.domains_min) == (replicas, domains_min)
    assert parse_options(BASE).kept.settings.keepers == 0


def test_options_of_a_store_are_read(tmp_path: Path) -> None:
    def read(*words: str) -> Any:
        return parse_options([*BASE, *words]).kept

    assert read().store is None
    assert (read().settings.keep, read().settings.domains_min) == (1, 2)
    folder = read("--store", f"folder:{tmp_path}", "--store-deadline-s", "5")
    assert folder.store == FolderSettings(folder=tmp_path, deadline_s=5)
    assert folder.settings.lower["folder"].cadence.every_n_steps == 1
    s3 = read(
        *("--store", "s3://bucket/a/b", "--store-region", "eu-north-1", "--store-path-style"),
        *("--store-part-size-mib", "8", "--store-attempts", "2", "--store-every-s", "60"),
        *("--store-keep", "3", "--store-waiting-max", "2"),
    )
    assert s3.store == S3Settings(
        bucket="bucket",
        prefix="a/b",
        region="eu-north-1",
        force_path_style=True,
        part_size_mib=8,
        attempts=2,
    )
    tier = s3.settings.lower["s3"]
    assert (tier.cadence.every_s, tier.keep, tier.waiting_max) == (60.0, 3, 2)
