"""Orders of the coordinator to an agent."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from resilience.agent.agent import Agent
from resilience.comm.messages import Ready


def test_message_that_is_no_order_is_named() -> None:
    with pytest.raises(ValueError, match="Ready is no order to an agent"):
        Agent.obey(Mock(spec=Agent), Ready(pid=1))
