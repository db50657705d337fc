/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lease by RDMA. Each has a protection domain of its own, so that a key of one consumer is
 * useless on another's connection, and a slab is registered there when it is mapped; nothing here
 * runs per page. What fences a slab is the end of its registration, whatever the consumer does;
 * what fences an epoch is the end of its queue pairs.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store/store.h"
#include "verbs/verbs.h"

#define CQ_ENTRIES 16u /* nothing is ever posted on a donor's queue pair */

struct iswi_store_rdma {
	struct iswi_verbs_choice choice;
	struct iswi_vdev *dev;
	struct iswi_vpd *pd;
	struct iswi_vcq *cq;
	struct iswi_vqp *qp[ISW_RDMA_QUEUES_MAX];
	uint32_t qp_count;
	void *probe;
	struct iswi_vmr *probe_mr;
	struct {
		struct iswi_vmr *mr; /* NULL: not registered */
		uint32_t rkey;
	} slot[]; /* slots_max */
};

/* Both of a lease's locks are free. NULL: there is no such lease. */
static struct iswi_lease *enter(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease != NULL)
		lease->users++;
	pthread_mutex_unlock(&store->lock);
	if (lease != NULL)
		pthread_mutex_lock(&lease->rdma_lock);
	return lease;
}

static void leave(struct iswi_lease *lease)
{
	isw_store *store = lease->store;

	pthread_mutex_unlock(&lease->rdma_lock);
	pthread_mutex_lock(&store->lock);
	lease->users--;
	pthread_cond_broadcast(&store->changed);
	pthread_mutex_unlock(&store->lock);
}

static int end_queue_pairs(struct iswi_lease *lease)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	int code;

	while (rdma->qp_count > 0) {
		code = verbs->qp_free(rdma->qp[rdma->qp_count - 1]);
		if (code != 0)
			return code;
		rdma->qp_count--;
		atomic_fetch_sub_explicit(&lease->rdma_connections, 1, memory_order_relaxed);
	}
	return 0;
}

static int unregister(struct iswi_lease *lease, uint32_t slot)
{
	struct iswi_store_rdma *rdma = lease->rdma;
	int code;

	if (rdma->slot[slot].mr == NULL)
		return 0;
	code = lease->store->verbs->mr_free(rdma->slot[slot].mr);
	if (code != 0)
		return code;
	rdma->slot[slot].mr = NULL;
	atomic_fetch_sub_explicit(&lease->store->rdma_regions, 1, memory_order_relaxed);
	return 0;
}

int iswi_lease_rdma_end(struct iswi_lease *lease)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma;
	int code = 0;

	pthread_mutex_lock(&lease->rdma_lock);
	rdma = lease->rdma;
	if (rdma == NULL)
		goto out;
	code = end_queue_pairs(lease);
	for (uint32_t i = 0; i < lease->slots_max && code == 0; i++)
		code = unregister(lease, i);
	if (code == 0 && rdma->probe_mr != NULL)
		code = verbs->mr_free(rdma->probe_mr);
	if (code != 0)
		goto out; /* it all stays, and so does the memory behind it */
	if (rdma->cq != NULL)
		verbs->cq_free(rdma->cq);
	if (rdma->pd != NULL)
		verbs->pd_free(rdma->pd);
	if (rdma->dev != NULL)
		verbs->close(rdma->dev);
	free(rdma->probe);
	free(rdma);
	lease->rdma = NULL;
out:
	pthread_mutex_unlock(&lease->rdma_lock);
	return code;
}

int iswi_slot_rdma_end(struct iswi_lease *lease, uint32_t slot, bool forced)
{
	int code = 0;

	pthread_mutex_lock(&lease->rdma_lock);
	if (lease->rdma == NULL)
		goto out;
	code = unregister(lease, slot);
	if (code == 0 && !forced)
		goto out;
	/*
	 * A device that keeps a registration keeps it from nobody when the connections are gone.
	 * Nor does a request that is still on its way meet the slot's next slab then, whose key a
	 * device may make the same. The consumer hears it from the TCP connection beside them.
	 */
	code = end_queue_pairs(lease);
	pthread_mutex_lock(&lease->store->lock);
	iswi_lease_shut(lease);
	pthread_mutex_unlock(&lease->store->lock);
out:
	pthread_mutex_unlock(&lease->rdma_lock);
	return code;
}

/* ---------------------------------------------------------------------------- opening */

/* rdma_lock held. What was made is lease->rdma's also when it fails. */
static int make_domain(struct iswi_lease *lease, struct isw_rdma_key *probe_out,
		       struct isw_error *error)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	struct iswi_verbs_key key;
	int code = verbs->open(rdma->choice.device, &rdma->dev, error);

	if (code != 0)
		return code;
	code = verbs->pd_make(rdma->dev, &rdma->pd);
	if (code == 0)
		code = verbs->cq_make(rdma->dev, CQ_ENTRIES, &rdma->cq, NULL);
	if (code == 0) {
		rdma->probe = aligned_alloc(ISW_PAGE_BYTES, ISW_PAGE_BYTES);
		code = rdma->probe == NULL ? -ENOMEM : 0;
	}
	if (code == 0) {
		memset(rdma->probe, 0, ISW_PAGE_BYTES);
		code = verbs->mr_make(rdma->pd, rdma->probe, ISW_PAGE_BYTES, ISWI_VERBS_PEER_READS,
				      &rdma->probe_mr, &key);
	}
	if (code != 0)
		return iswi_error(error, code, "RDMA device %s can serve no further lease: %s",
				  rdma->choice.device, strerror(-code));
	*probe_out = (struct isw_rdma_key){(uintptr_t)rdma->probe, key.remote};
	return 0;
}

/* rdma_lock held. */
static int make_queue_pair(struct iswi_lease *lease, const struct isw_rdma_end *peer,
			   struct isw_rdma_end *end_out, struct isw_error *error)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	const struct iswi_verbs_qp_config config = {
		.port = rdma->choice.port,
		.gid_index = rdma->choice.gid_index,
		.sends_max = 1,
		.peer = ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES,
	};
	struct iswi_verbs_path path;
	struct iswi_vqp *qp;
	int code;

	*end_out = rdma->choice.end;
	code = iswi_verbs_psn(&end_out->psn);
	if (code == 0)
		code = iswi_verbs_meet(&rdma->choice, end_out->psn, peer, &path, error);
	if (code != 0)
		return code;
	code = verbs->qp_make(rdma->pd, rdma->cq, &config, &qp, &end_out->number);
	if (code == 0) {
		rdma->qp[rdma->qp_count++] = qp;
		atomic_fetch_add_explicit(&lease->rdma_connections, 1, memory_order_relaxed);
		code = verbs->qp_connect(qp, &path);
	}
	if (code != 0)
		return iswi_error(error, code, "RDMA device %s can take no further connection: %s",
				  rdma->choice.device, strerror(-code));
	return 0;
}

int isw_store_rdma_open(isw_store *store, uint64_t id, const struct isw_rdma_end *peers,
			uint32_t count, struct isw_rdma_end *ends_out,
			struct isw_rdma_key *probe_out, struct isw_error *error)
{
	struct iswi_verbs_choice choice;
	struct iswi_lease *lease;
	bool open;
	int code;

	if (count == 0 || count > ISW_RDMA_QUEUES_MAX)
		return iswi_error(error, -EINVAL, "a lease takes 1 to %u connections by RDMA",
				  ISW_RDMA_QUEUES_MAX);
	code = iswi_verbs_choose_for(store->verbs, &peers[0], &choice, error);
	if (code != 0)
		return code;
	lease = enter(store, id);
	if (lease == NULL)
		return iswi_error(error, -ENOENT, "no such lease");
	pthread_mutex_unlock(&lease->rdma_lock);
	code = iswi_lease_rdma_end(lease);
	pthread_mutex_lock(&lease->rdma_lock);
	/* A renewal that begins later ends what is made here: it waits for the lock. */
	pthread_mutex_lock(&store->lock);
	open = lease->open;
	pthread_mutex_unlock(&store->lock);
	if (code != 0 || !open || lease->rdma != NULL) {
		code = iswi_error(error, -EBUSY, "the lease's connections are just being changed");
		goto out;
	}
	lease->rdma =
		calloc(1, sizeof(*lease->rdma) + lease->slots_max * sizeof(lease->rdma->slot[0]));
	if (lease->rdma == NULL) {
		code = iswi_error(error, -ENOMEM, "no memory for RDMA");
		goto out;
	}
	lease->rdma->choice = choice;
	code = make_domain(lease, probe_out, error);
	for (uint32_t i = 0; i < count && code == 0; i++)
		code = make_queue_pair(lease, &peers[i], &ends_out[i], error);
	if (code != 0) {
		pthread_mutex_unlock(&lease->rdma_lock);
		iswi_lease_rdma_end(lease);
		pthread_mutex_lock(&lease->rdma_lock);
	}
out:
	leave(lease);
	return code;
}

int isw_store_rdma_close(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease = enter(store, id);
	int code;

	if (lease == NULL)
		return -ENOENT;
	pthread_mutex_unlock(&lease->rdma_lock);
	code = iswi_lease_rdma_end(lease);
	pthread_mutex_lock(&lease->rdma_lock);
	leave(lease);
	return code;
}

/* ------------------------------------------------------------------------------- keys */

/* The slot's memory while it is mapped under that generation. NULL: it is not. */
static void *mapped_memory(struct iswi_lease *lease, uint32_t slot, uint64_t generation)
{
	void *memory = NULL;
	uint64_t word;

	if (slot >= lease->slots_max)
		return NULL;
	pthread_mutex_lock(&lease->store->lock);
	word = atomic_load(&lease->slots[slot].word);
	if (word >> ISWI_SLOT_STATE_BITS == generation &&
	    (word & ISWI_SLOT_STATE_MASK) == ISWI_SLOT_MAPPED)
		memory = lease->slots[slot].memory;
	pthread_mutex_unlock(&lease->store->lock);
	return memory;
}

int isw_store_rdma_key(isw_store *store, uint64_t id, uint32_t slot, uint64_t generation,
		       struct isw_rdma_key *key_out, struct isw_error *error)
{
	struct iswi_lease *lease = enter(store, id);
	struct iswi_store_rdma *rdma;
	struct iswi_verbs_key key;
	void *memory;
	int code = 0;

	if (lease == NULL)
		return iswi_error(error, -ENOENT, "no such lease");
	rdma = lease->rdma;
	/* Without queue pairs a slot's registration may be one that could not be ended. */
	if (rdma == NULL || rdma->qp_count == 0) {
		code = iswi_error(error, -ENOTCONN, "the lease has no RDMA connections");
		goto out;
	}
	/* An unmap that comes later fences the slot first and then waits for rdma_lock. */
	memory = mapped_memory(lease, slot, generation);
	if (memory == NULL) {
		code = iswi_error(error, -ESTALE, "the slot holds another generation");
		goto out;
	}
	if (rdma->slot[slot].mr == NULL) {
		code = store->verbs->mr_make(rdma->pd, memory, store->config.slab_bytes,
					     ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES,
					     &rdma->slot[slot].mr, &key);
		if (code != 0) {
			rdma->slot[slot].mr = NULL;
			atomic_fetch_add_explicit(&store->rdma_failures, 1, memory_order_relaxed);
			iswi_error(error, code,
				   "a slab cannot be registered with RDMA device %s: "
				   "%s%s",
				   rdma->choice.device, strerror(-code),
				   code == -ENOMEM ? " (ulimit -l, LimitMEMLOCK=infinity)" : "");
			goto out;
		}
		rdma->slot[slot].rkey = key.remote;
		atomic_fetch_add_explicit(&store->rdma_regions, 1, memory_order_relaxed);
	}
	*key_out = (struct isw_rdma_key){(uintptr_t)memory, rdma->slot[slot].rkey};
out:
	leave(lease);
	return code;
}

void iswi_store_verbs_set(isw_store *store, const struct iswi_verbs *verbs)
{
	store->verbs = verbs;
}
