"""Imported relatively; a host or another pack may have a `helper` of its own."""

WHO = "zoo_nodes"
calls = []
