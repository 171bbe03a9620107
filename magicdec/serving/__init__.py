"""Requests that come and go: slots, the scheduler that fills them, and the engine that users talk
to.
"""
