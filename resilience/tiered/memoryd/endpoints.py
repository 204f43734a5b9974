"""Addresses to listen on and to connect to, as they are written on a command line."""

from __future__ import annotations

import argparse
import ipaddress


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT; raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdecimal()
    if not host or not is_number or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as 127.0.0.1:9200")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Say whether only processes of this machine reach a host's address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
