"""The demonstration behind ``up --demo``: real servers and workers on one small card, with and without the series."""
