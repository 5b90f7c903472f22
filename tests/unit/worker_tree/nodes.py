async def init_extra_nodes(init_custom_nodes=True, init_api_nodes=True):
    assert not init_custom_nodes
