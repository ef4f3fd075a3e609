"""Shifted fields: is the safe flag a gate?"""
