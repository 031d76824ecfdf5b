"""Forecasts and alarms: late data, pending deletions in Kafka, and the state of each window.

It reads the ledger and Kafka through their ports and writes nothing. It may know publishing, planning and the rooms
below. Open `watch` first; `outlook` and `forecast` estimate records at risk, `strip` and `window_state` show windows.
"""
