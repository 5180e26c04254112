"""Lineage: from every trained token to its dataset line, and to every checkpoint it touched."""
