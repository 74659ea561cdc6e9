"""Plans by goals: the configurations that meet limits on quality, latency, throughput and memory, and the best of them.

`parse` reads goals, `quality` knows what recipes and KV formats cost, `candidates` makes the configurations, `simulate`
gives latencies under load, `search` judges, `advice` says what each technique would bring, `report` prints. No torch.
"""
