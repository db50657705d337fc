/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a lease has by RDMA: a protection domain of its own, so that one consumer's key is useless
 * on another's connection, its queue pairs, and in it the registrations of its slabs. The lease's
 * lock (struct iswi_rdma_lease) is held everywhere here.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store/rdma.h"

#define SLAB_PEER  (ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES)
#define CHANGING   "the lease's connections are just being changed"
#define CQ_ENTRIES 16u /* nothing is ever posted on a donor's queue pair */

int iswi_rdma_end_queue_pairs(struct iswi_rdma_lease *mine)
{
	struct iswi_lease_domain *domain = mine->domain;
	int code;

	while (domain != NULL && domain->qp_count > 0) {
		code = mine->store->verbs->qp_free(domain->qp[domain->qp_count - 1]);
		if (code != 0)
			return code;
		domain->qp_count--;
		atomic_fetch_sub_explicit(iswi_rdma_connections(mine), 1, memory_order_relaxed);
	}
	return 0;
}

int iswi_rdma_unregister(struct iswi_rdma_lease *mine, uint32_t slot)
{
	struct iswi_lease_domain *domain = mine->domain;
	struct iswi_vmr *mr = domain->slot[slot].mr;
	int code;

	if (mr == NULL)
		return 0;
	domain->slot[slot].dead = true;
	code = mine->store->verbs->mr_free(mr);
	if (code != 0) {
		domain->stuck = true;
		return code;
	}
	domain->slot[slot].mr = NULL;
	atomic_fetch_sub_explicit(&mine->store->regions, 1, memory_order_relaxed);
	if (!domain->slot[slot].left)
		iswi_slab_ahead_leave(mine->store, mine->lease->slots[slot].slab);
	domain->slot[slot].left = domain->slot[slot].dead = false;
	return 0;
}

int iswi_rdma_end_all(struct iswi_rdma_lease *mine)
{
	struct iswi_lease_domain *domain = mine->domain;
	int code;

	if (domain == NULL)
		return 0;
	code = iswi_rdma_end_queue_pairs(mine);
	for (uint32_t i = 0; i < mine->lease->slots_max && code == 0; i++)
		code = iswi_rdma_unregister(mine, i);
	if (code == 0 && domain->probe_mr != NULL)
		code = mine->store->verbs->mr_free(domain->probe_mr);
	if (code != 0)
		return code; /* it all stays, and so does the memory behind it */
	if (domain->cq != NULL)
		mine->store->verbs->cq_free(domain->cq);
	if (domain->pd != NULL)
		mine->store->verbs->pd_free(domain->pd);
	if (domain->device != NULL)
		iswi_store_device_put(mine->store, domain->device);
	free(domain->probe);
	free(domain);
	mine->domain = NULL;
	return 0;
}

/* At a limit, a slab that is registered for nobody gives way. */
static int make_region(struct iswi_rdma_store *rdma, struct iswi_vpd *pd, void *memory,
		       uint64_t bytes, unsigned int peer, struct iswi_vmr **mr_out,
		       struct iswi_verbs_key *key_out)
{
	int code = rdma->verbs->mr_make(pd, memory, bytes, peer, mr_out, key_out);

	if (iswi_store_is_limit(code) && iswi_store_ahead_end_one(rdma, false))
		code = rdma->verbs->mr_make(pd, memory, bytes, peer, mr_out, key_out);
	return code;
}

int iswi_rdma_make_domain(struct iswi_rdma_lease *mine, struct isw_error *error)
{
	const struct iswi_verbs *verbs = mine->store->verbs;
	struct iswi_lease_domain *domain = mine->domain;
	struct iswi_verbs_key key;
	int code =
		iswi_store_device_get(mine->store, domain->choice.device, &domain->device, error);

	if (code != 0)
		return code;
	code = verbs->pd_make(domain->device->dev, &domain->pd);
	if (code == 0)
		code = verbs->cq_make(domain->device->dev, CQ_ENTRIES, &domain->cq, NULL);
	if (code == 0) {
		domain->probe = aligned_alloc(ISW_PAGE_BYTES, ISW_PAGE_BYTES);
		code = domain->probe == NULL ? -ENOMEM : 0;
	}
	if (code == 0) {
		memset(domain->probe, 0, ISW_PAGE_BYTES);
		code = make_region(mine->store, domain->pd, domain->probe, ISW_PAGE_BYTES,
				   ISWI_VERBS_PEER_READS, &domain->probe_mr, &key);
	}
	if (code != 0) {
		iswi_store_device_failed(domain->device, code);
		return iswi_error(error, code, "RDMA device %s can serve no further lease: %s",
				  domain->choice.device, strerror(-code));
	}
	domain->probe_rkey = key.remote;
	return 0;
}

int iswi_rdma_make_queue_pair(struct iswi_rdma_lease *mine, const struct isw_rdma_end *peer,
			      struct isw_rdma_end *end_out, struct isw_error *error)
{
	const struct iswi_verbs *verbs = mine->store->verbs;
	struct iswi_lease_domain *domain = mine->domain;
	const struct iswi_verbs_qp_config config = {
		.port = domain->choice.port,
		.gid_index = domain->choice.gid_index,
		.sends_max = 1,
		.peer = ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES,
	};
	struct iswi_verbs_path path;
	struct iswi_vqp *qp;
	int code;

	*end_out = domain->choice.end;
	code = iswi_verbs_psn(&end_out->psn);
	if (code == 0)
		code = iswi_verbs_meet(&domain->choice, end_out->psn, peer, &path, error);
	if (code != 0)
		return code;
	code = verbs->qp_make(domain->pd, domain->cq, &config, &qp, &end_out->number);
	if (code == 0) {
		domain->qp[domain->qp_count++] = qp;
		atomic_fetch_add_explicit(iswi_rdma_connections(mine), 1, memory_order_relaxed);
		code = verbs->qp_connect(qp, &path);
	}
	if (code != 0)
		return iswi_error(error, code, "RDMA device %s can take no further connection: %s",
				  domain->choice.device, strerror(-code));
	return 0;
}

static bool has_registered(const struct iswi_rdma_lease *mine)
{
	for (uint32_t i = 0; i < mine->lease->slots_max; i++)
		if (mine->domain->slot[i].mr != NULL)
			return true;
	return false;
}

/*
 * Ends the previous connections and keeps what is registered, where the next ones can use
 * it. On success the domain is there, perhaps without anything in it.
 */
int iswi_rdma_begin(struct iswi_rdma_lease *mine, const struct iswi_verbs_choice *choice,
		    struct isw_error *error)
{
	isw_store *store = mine->lease->store;
	struct iswi_lease_domain *domain = mine->domain;
	bool open;

	/* A later renewal waits for the lock and then ends what is made here. */
	pthread_mutex_lock(&store->lock);
	open = mine->lease->open;
	pthread_mutex_unlock(&store->lock);
	if (!open)
		return iswi_error(error, -EBUSY, CHANGING);
	if (iswi_rdma_end_queue_pairs(mine) != 0)
		return iswi_error(error, -EBUSY, CHANGING);
	/* To end what is registered there takes a while: isw_store_rdma_let_go does it. */
	if (domain != NULL && has_registered(mine) && atomic_load(&domain->device->stale))
		return iswi_error(error, -EBUSY,
				  "slabs are still registered with RDMA device %s, which failed or "
				  "is being removed",
				  domain->device->name);
	if (domain != NULL &&
	    (domain->stuck || !iswi_store_device_is(domain->device, choice->device)))
		if (iswi_rdma_end_all(mine) != 0)
			return iswi_error(error, -EBUSY, CHANGING);
	if (mine->domain == NULL)
		mine->domain =
			calloc(1, sizeof(*mine->domain) +
					  mine->lease->slots_max * sizeof(mine->domain->slot[0]));
	if (mine->domain == NULL)
		return iswi_error(error, -ENOMEM, "no memory for RDMA");
	mine->domain->choice = *choice;
	return 0;
}

/*
 * Moves what was registered ahead into the lease's domain. NULL: nothing was, or it has been freed.
 * dead_out: it could be neither moved nor freed.
 */
static struct iswi_vmr *move_in(struct iswi_rdma_lease *mine, struct iswi_vmr *mr,
				struct iswi_store_device *device, struct iswi_verbs_key *key_out,
				bool *dead_out)
{
	const struct iswi_verbs *verbs = mine->store->verbs;
	struct iswi_lease_domain *domain = mine->domain;
	int code = 0;

	*dead_out = false;
	if (mr == NULL)
		return NULL;
	if (device != domain->device) {
		verbs->mr_free(mr); /* if it cannot be freed, nobody reaches it */
		mr = NULL;
	} else {
		code = verbs->mr_move(mr, domain->pd, SLAB_PEER, key_out);
		if (code == -EOPNOTSUPP || code == -ENOSYS)
			atomic_store(&device->immovable, true);
		if (code != 0 && verbs->mr_free(mr) == 0)
			mr = NULL;
	}
	*dead_out = mr != NULL && code != 0;
	iswi_store_device_put(mine->store, device); /* the lease is a user of it, too */
	return mr;
}

int iswi_rdma_register(struct iswi_rdma_lease *mine, uint32_t slot, void *memory, bool at_hand,
		       struct isw_error *error)
{
	struct iswi_lease_domain *domain = mine->domain;
	uint32_t slab = mine->lease->slots[slot].slab;
	const isw_store *store = mine->lease->store;
	struct iswi_store_device *device;
	struct iswi_verbs_key key = {0};
	struct iswi_vmr *mr;
	int code = iswi_slab_ahead_take(mine->store, slab, at_hand ? domain->device : NULL, &mr,
					&device);

	if (code != 0)
		return code;
	mr = move_in(mine, mr, device, &key, &domain->slot[slot].dead);
	if (mr == NULL && at_hand) {
		iswi_slab_ahead_leave(mine->store, slab);
		return -EAGAIN;
	}
	if (mr == NULL)
		code = make_region(mine->store, domain->pd, memory, store->config.slab_bytes,
				   SLAB_PEER, &mr, &key);
	if (code == 0) {
		domain->slot[slot].mr = mr;
		domain->slot[slot].rkey = key.remote;
		atomic_fetch_add_explicit(&mine->store->regions, 1, memory_order_relaxed);
		return 0;
	}
	iswi_slab_ahead_leave(mine->store, slab);
	atomic_fetch_add_explicit(&mine->store->failures, 1, memory_order_relaxed);
	iswi_store_device_failed(domain->device, code);
	return iswi_error(error, code, "a slab cannot be registered with RDMA device %s: %s%s",
			  domain->choice.device, strerror(-code),
			  code == -ENOMEM ? " (ulimit -l, LimitMEMLOCK=infinity)" : "");
}
