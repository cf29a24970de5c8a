"""Packages of others on acc; where one is missing, its tests are skipped."""
