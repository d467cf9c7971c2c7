"""Integrations: gradsync as a plug-in of other people's training frameworks."""
