"""The sample ledger: who trains on which samples when members go at their own pace."""
