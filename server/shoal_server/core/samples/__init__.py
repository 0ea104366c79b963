"""The sample ledger: the samples that each member trains on, if members go at their own pace."""
