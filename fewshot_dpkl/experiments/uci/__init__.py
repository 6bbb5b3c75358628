"""Regression on small data: sweep, tables and figures."""
