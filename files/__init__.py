"""Files and folders, the lowest package: atomic writes, hashes, locks, data formats, and records in JSON.

The modules, in the order in which to read them:

    rows of data          rows, strict_json, parquet, fields, conversations
    what Heed writes      atomic, records, hashes
    code and servers      importing, retries, urls
"""
