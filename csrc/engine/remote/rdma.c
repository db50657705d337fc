/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine adds to the RDMA transport: its memory, and its remotes when a device leaves. */
#include <errno.h>

#include "engine/remote/remote.h"
#include "transport/rdma.h"

void iswi_engine_verbs_set(struct isw_engine *e, const struct iswi_verbs *verbs)
{
	e->rdma->verbs = verbs;
}

int isw_rdma_offer_make(isw_engine *e, const char *host, uint32_t queues, uint32_t slots,
			isw_rdma_offer **offer_out, struct isw_error *error)
{
	const struct iswi_rdma_offer_config config = {
		.engine = e,
		.domains = e->rdma,
		.host = host,
		.memory = e->staging,
		.memory_bytes = (uint64_t)e->config.staging_pages * ISW_PAGE_BYTES,
		.slab_bytes = e->config.slab_bytes,
		.request_bytes_max = e->config.request_bytes_max,
		.queues = queues,
		.slots = slots,
	};

	return iswi_rdma_offer_make(&config, offer_out, error);
}

uint32_t isw_rdma_let_go(isw_engine *e)
{
	uint32_t count = iswi_rdma_domains_look(e->rdma);

	for (uint32_t i = 0; i < e->config.remotes_max; i++) {
		struct iswi_remote *r = &e->remotes[i];

		/* Against a reconnect, which begins under it; never held while one is going on. */
		pthread_mutex_lock(&e->control);
		if (atomic_load(&r->state) == ISWI_REMOTE_UP && r->queues[0]->ops->is_leaving &&
		    r->queues[0]->ops->is_leaving(r->queues[0]))
			iswi_remote_fence(e, i, -ENODEV);
		pthread_mutex_unlock(&e->control);
	}
	return count;
}
