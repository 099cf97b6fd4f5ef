"""The numbers that pages and rows go by. They are all integers and none of them may stand for another."""

from __future__ import annotations

from typing import NewType

#: what page tables of requests hold and index keys are addressed by
LogicalPage = NewType("LogicalPage", int)
#: a page of the latent pools on the device
DevicePage = NewType("DevicePage", int)
#: a page of the host pool
HostPage = NewType("HostPage", int)
#: a request's row of the device tables
Slot = NewType("Slot", int)
#: of a token in its request, from 0
Position = NewType("Position", int)
#: ``page * page_size + offset`` within one pool
Row = NewType("Row", int)
