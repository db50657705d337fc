/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leases by RDMA: the calls of the public header, and the table of functions that the store calls.
 * Nothing here runs per page. What fences a slab is the end of its registration, whatever the
 * consumer does; what fences an epoch is the end of its queue pairs. Slabs stay registered from one
 * epoch to the next.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store/rdma.h"

static struct iswi_rdma_lease *share_of(const struct iswi_lease *lease)
{
	return lease->parts[ISW_TRANSPORT_RDMA];
}

/* NULL: there is no such lease. Else it stays, and its lock is held, until `leave`. */
static struct iswi_rdma_lease *enter(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease != NULL)
		iswi_lease_enter(lease);
	pthread_mutex_unlock(&store->lock);
	if (lease == NULL)
		return NULL;
	pthread_mutex_lock(&share_of(lease)->lock);
	return share_of(lease);
}

static void leave_unlocked(struct iswi_rdma_lease *mine)
{
	isw_store *store = mine->lease->store;

	pthread_mutex_lock(&store->lock);
	iswi_lease_leave(mine->lease);
	pthread_mutex_unlock(&store->lock);
}

static void leave(struct iswi_rdma_lease *mine)
{
	pthread_mutex_unlock(&mine->lock);
	leave_unlocked(mine);
}

/* ---------------------------------------------------------------------------- opening */

int isw_store_rdma_open(isw_store *store, uint64_t id, const struct isw_rdma_end *peers,
			uint32_t count, struct isw_rdma_end *ends_out,
			struct isw_rdma_key *probe_out, struct isw_error *error)
{
	struct iswi_verbs_choice choice;
	struct iswi_rdma_lease *mine;
	int code;

	if (count == 0 || count > ISW_RDMA_QUEUES_MAX)
		return iswi_error(error, -EINVAL, "a lease takes 1 to %u connections by RDMA",
				  ISW_RDMA_QUEUES_MAX);
	code = iswi_verbs_choose_for(iswi_rdma_of(store)->verbs, &peers[0], &choice, error);
	if (code != 0)
		return code;
	mine = enter(store, id);
	if (mine == NULL)
		return iswi_error(error, -ENOENT, "no such lease");
	code = iswi_rdma_begin(mine, &choice, error);
	if (code != 0)
		goto out;
	code = mine->domain->pd != NULL ? 0 : iswi_rdma_make_domain(mine, error);
	for (uint32_t i = 0; i < count && code == 0; i++)
		code = iswi_rdma_make_queue_pair(mine, &peers[i], &ends_out[i], error);
	if (code != 0)
		iswi_rdma_end_all(mine);
	else
		*probe_out = (struct isw_rdma_key){(uintptr_t)mine->domain->probe,
						   mine->domain->probe_rkey};
	if (code == 0)
		iswi_store_device_chosen(mine->store, mine->domain->device);
out:
	leave(mine);
	return code;
}

/* The TCP connections beside them tell the consumer. */
static int disconnect(struct iswi_rdma_lease *mine)
{
	int code = 0;

	pthread_mutex_lock(&mine->lock);
	if (mine->domain != NULL && mine->domain->qp_count > 0) {
		code = iswi_rdma_end_queue_pairs(mine);
		pthread_mutex_lock(&mine->lease->store->lock);
		iswi_lease_shut(mine->lease);
		pthread_mutex_unlock(&mine->lease->store->lock);
	}
	pthread_mutex_unlock(&mine->lock);
	return code;
}

/*
 * Ends what a lease without connections has registered, slab by slab, because a renewal waits for
 * the lock and its consumer does not wait for long. If the lease is connected again meanwhile, it
 * keeps the rest.
 */
static int end_rest(struct iswi_rdma_lease *mine)
{
	uint32_t slot = 0;
	int code = 0;
	bool more;

	do {
		pthread_mutex_lock(&mine->lock);
		more = mine->domain != NULL && mine->domain->qp_count == 0;
		while (more && slot < mine->lease->slots_max && mine->domain->slot[slot].mr == NULL)
			slot++;
		if (more && slot < mine->lease->slots_max) {
			code = iswi_rdma_unregister(mine, slot++);
		} else if (more) {
			code = iswi_rdma_end_all(mine);
			more = false;
		}
		pthread_mutex_unlock(&mine->lock);
	} while (more && code == 0);
	return code;
}

int isw_store_rdma_close(isw_store *store, uint64_t id)
{
	struct iswi_rdma_lease *mine = enter(store, id);
	int code;

	if (mine == NULL)
		return -ENOENT;
	pthread_mutex_unlock(&mine->lock);
	code = disconnect(mine);
	if (code == 0)
		code = end_rest(mine);
	pthread_mutex_lock(&mine->lock);
	leave(mine);
	return code;
}

/*
 * The caller counts among the lease's users. Ends the connections through a device that is leaving,
 * of which the consumer hears. rest: ends what is registered with a device that is stale.
 */
static void let_go(struct iswi_rdma_lease *mine, bool rest)
{
	const struct iswi_store_device *device;
	bool leaving = false, stale = false;

	pthread_mutex_lock(&mine->lock);
	device = mine->domain != NULL ? mine->domain->device : NULL;
	if (device != NULL) {
		leaving = atomic_load(&device->leaving);
		stale = atomic_load(&device->stale);
	}
	pthread_mutex_unlock(&mine->lock);
	/* What cannot be ended is tried again with the next call. */
	if (leaving && !rest)
		disconnect(mine);
	else if (stale && rest)
		end_rest(mine);
}

static bool has_stuck(isw_store *store)
{
	bool found = false;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->config.leases_max && !found; i++)
		found = store->leases[i] != NULL && store->leases[i]->stuck;
	pthread_mutex_unlock(&store->lock);
	return found;
}

/* The lease at that place, not locked. NULL: none, or whoever destroys it ends that, too. */
static struct iswi_rdma_lease *enter_place(isw_store *store, uint32_t number)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = store->leases[number];
	if (lease != NULL && lease->dying)
		lease = NULL;
	if (lease != NULL)
		iswi_lease_enter(lease);
	pthread_mutex_unlock(&store->lock);
	return lease != NULL ? share_of(lease) : NULL;
}

uint32_t isw_store_rdma_let_go(isw_store *store)
{
	bool any;
	uint32_t count = iswi_store_devices_look(iswi_rdma_of(store), &any);

	if (!any && !has_stuck(store))
		return count;
	/* Consumers first: they wait. */
	for (uint32_t rest = 0; rest < 2; rest++) {
		for (uint32_t i = 0; i < store->config.leases_max; i++) {
			struct iswi_rdma_lease *mine = enter_place(store, i);

			if (mine == NULL) {
				iswi_lease_destroy_again(store, i);
				continue;
			}
			let_go(mine, rest != 0);
			leave_unlocked(mine);
		}
	}
	while (iswi_store_ahead_end_one(iswi_rdma_of(store), true))
		;
	return count;
}

int isw_store_rdma_pause(isw_store *store, uint64_t id)
{
	struct iswi_rdma_lease *mine = enter(store, id);
	int code;

	if (mine == NULL)
		return -ENOENT;
	code = iswi_rdma_end_queue_pairs(mine);
	leave(mine);
	return code;
}

/* ------------------------------------------------------------------------------- keys */

/* The slot's memory while it is mapped under that generation. NULL: it is not. */
static void *mapped_memory(struct iswi_rdma_lease *mine, uint32_t slot, uint64_t generation)
{
	void *memory = NULL;
	uint64_t word;

	if (slot >= mine->lease->slots_max)
		return NULL;
	pthread_mutex_lock(&mine->lease->store->lock);
	word = atomic_load(&mine->lease->slots[slot].word);
	if (word >> ISWI_SLOT_STATE_BITS == generation &&
	    (word & ISWI_SLOT_STATE_MASK) == ISWI_SLOT_MAPPED)
		memory = mine->lease->slots[slot].memory;
	pthread_mutex_unlock(&mine->lease->store->lock);
	return memory;
}

int isw_store_rdma_key(isw_store *store, uint64_t id, uint32_t slot, uint64_t generation,
		       uint32_t at_hand, struct isw_rdma_key *key_out, struct isw_error *error)
{
	struct iswi_rdma_lease *mine = enter(store, id);
	struct iswi_lease_domain *domain;
	void *memory;
	int code = 0;

	if (mine == NULL)
		return iswi_error(error, -ENOENT, "no such lease");
	domain = mine->domain;
	/* Without queue pairs the slot may have a registration that could not be ended. */
	if (domain == NULL || domain->qp_count == 0) {
		code = iswi_error(error, -ENOTCONN, "the lease has no RDMA connections");
		goto out;
	}
	/* A later unmap first fences the slot and then waits for the lock. */
	memory = mapped_memory(mine, slot, generation);
	if (memory == NULL) {
		code = iswi_error(error, -ESTALE, "the slot holds another generation");
		goto out;
	}
	if (domain->slot[slot].mr == NULL)
		code = iswi_rdma_register(mine, slot, memory, at_hand != 0, error);
	if (code == 0 && domain->slot[slot].dead)
		code = iswi_error(error, -EIO, "the slab's registration could not be ended");
	if (code == 0)
		*key_out = (struct isw_rdma_key){(uintptr_t)memory, domain->slot[slot].rkey};
out:
	leave(mine);
	return code;
}

/* ------------------------------------------------------------------ the store's table */

static int rdma_create(isw_store *store, void **part_out)
{
	struct iswi_rdma_store *rdma = calloc(1, sizeof(*rdma));

	if (rdma == NULL)
		return -ENOMEM;
	rdma->slabs = calloc(store->slabs_size, sizeof(*rdma->slabs));
	if (rdma->slabs == NULL) {
		free(rdma);
		return -ENOMEM;
	}
	rdma->store = store;
	rdma->verbs = &iswi_verbs_system;
	pthread_mutex_init(&rdma->devices_lock, NULL);
	*part_out = rdma;
	return 0;
}

static void rdma_destroy(isw_store *store)
{
	struct iswi_rdma_store *rdma = iswi_rdma_of(store);

	for (uint32_t i = 0; i < store->slabs_size; i++)
		iswi_slab_ahead_end(rdma, i);
	pthread_mutex_destroy(&rdma->devices_lock);
	free(rdma->slabs);
	free(rdma);
}

static void rdma_stats(isw_store *store, struct isw_store_stats *stats_out)
{
	struct iswi_rdma_store *rdma = iswi_rdma_of(store);

	for (uint32_t i = 0; i < store->slabs_size; i++)
		stats_out->rdma_ahead += rdma->slabs[i].ahead != NULL;
	for (uint32_t i = 0; i < store->config.leases_max; i++)
		if (store->leases[i] != NULL && !store->leases[i]->dying)
			stats_out->rdma_connections += atomic_load_explicit(
				iswi_rdma_connections(share_of(store->leases[i])),
				memory_order_relaxed);
	stats_out->rdma_regions = iswi_counted(&rdma->regions);
	stats_out->rdma_failures = iswi_counted(&rdma->failures);
}

static int rdma_lease_create(struct iswi_lease *lease, void **part_out)
{
	struct iswi_rdma_lease *mine = calloc(1, sizeof(*mine));

	if (mine == NULL)
		return -ENOMEM;
	mine->lease = lease;
	mine->store = iswi_rdma_of(lease->store);
	pthread_mutex_init(&mine->lock, NULL);
	*part_out = mine;
	return 0;
}

static void rdma_lease_destroy(struct iswi_lease *lease)
{
	pthread_mutex_destroy(&share_of(lease)->lock);
	free(share_of(lease));
}

static void rdma_lease_stats(const struct iswi_lease *lease, struct isw_lease_stats *stats_out)
{
	stats_out->rdma_connections =
		atomic_load_explicit(iswi_rdma_connections(share_of(lease)), memory_order_relaxed);
}

static int rdma_lease_end(struct iswi_lease *lease, bool pause)
{
	struct iswi_rdma_lease *mine = share_of(lease);
	int code;

	pthread_mutex_lock(&mine->lock);
	code = pause ? iswi_rdma_end_queue_pairs(mine) : iswi_rdma_end_all(mine);
	pthread_mutex_unlock(&mine->lock);
	return code;
}

static int rdma_slot_end(struct iswi_lease *lease, uint32_t slot, bool forced)
{
	struct iswi_rdma_lease *mine = share_of(lease);
	int code = 0, ended = 0;
	bool connected;

	pthread_mutex_lock(&mine->lock);
	if (mine->domain == NULL)
		goto out;
	connected = mine->domain->qp_count >
		    0; /* else pages go over TCP, which has a fence of its own */
	/*
	 * A request that is still on its way must not reach the slot's next slab, which a device
	 * may give the same key. The TCP connection beside them tells the consumer.
	 */
	if (forced)
		ended = iswi_rdma_end_queue_pairs(mine);
	code = iswi_rdma_unregister(mine, slot);
	if (code == 0 && ended == 0 && !(forced && connected))
		goto out;
	/* A registration that the device keeps is unreachable when the connections are gone. */
	code = iswi_rdma_end_queue_pairs(mine);
	if (mine->domain->slot[slot].mr != NULL && code == 0) {
		mine->domain->slot[slot].left = true;
		iswi_slab_ahead_leave(mine->store, lease->slots[slot].slab);
	}
	pthread_mutex_lock(&lease->store->lock);
	iswi_lease_shut(lease);
	pthread_mutex_unlock(&lease->store->lock);
out:
	pthread_mutex_unlock(&mine->lock);
	return code;
}

static void rdma_slab_end(isw_store *store, uint32_t slab)
{
	iswi_slab_ahead_end(iswi_rdma_of(store), slab);
}

const struct iswi_store_transport iswi_store_rdma = {
	.name = "rdma",
	.kind = ISW_TRANSPORT_RDMA,
	.create = rdma_create,
	.destroy = rdma_destroy,
	.stats = rdma_stats,
	.lease_create = rdma_lease_create,
	.lease_destroy = rdma_lease_destroy,
	.lease_stats = rdma_lease_stats,
	.lease_end = rdma_lease_end,
	.slot_end = rdma_slot_end,
	.slab_end = rdma_slab_end,
};

void iswi_store_verbs_set(isw_store *store, const struct iswi_verbs *verbs)
{
	iswi_rdma_of(store)->verbs = verbs;
}
