/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lease by RDMA. Each has a protection domain of its own, so that a key of one consumer is
 * useless on another's connection, and a slab's registration is put there when it is mapped
 * (rdma_ahead.c); nothing here runs per page. What fences a slab is the end of its registration,
 * whatever the consumer does; what fences an epoch is the end of its queue pairs. What was
 * registered stays so for the next epoch's.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store/rdma.h"

#define SLAB_PEER  (ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES)
#define CHANGING   "the lease's connections are just being changed"
#define CQ_ENTRIES 16u /* nothing is ever posted on a donor's queue pair */

/* Where a lease's slabs and connections are. */
struct rdma_domain {
	struct iswi_verbs_choice choice;
	struct iswi_store_device *device;
	struct iswi_vpd *pd;
	struct iswi_vcq *cq;
	struct iswi_vqp *qp[ISW_RDMA_QUEUES_MAX];
	uint32_t qp_count;
	bool stuck; /* a registration could not be ended: no connection is made here again */
	void *probe;
	struct iswi_vmr *probe_mr;
	uint32_t probe_rkey;
	struct {
		struct iswi_vmr *mr; /* NULL: not registered */
		uint32_t rkey;
		bool dead; /* it can only be freed */
		bool left; /* after the end of the connections: the slot's slab is another */
	} slot[];          /* slots_max */
};

/* RDMA's share of a lease. */
struct rdma_lease {
	struct iswi_lease *lease;
	struct iswi_rdma_store *store;
	pthread_mutex_t lock;
	struct rdma_domain *domain; /* under lock; NULL: there is none */
};

static struct rdma_lease *share_of(const struct iswi_lease *lease)
{
	return lease->parts[ISW_TRANSPORT_RDMA];
}

/* NULL: there is no such lease. Else it stays, and its lock is held, until `leave`. */
static struct rdma_lease *enter(isw_store *store, uint64_t id)
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

static void leave_unlocked(struct rdma_lease *mine)
{
	isw_store *store = mine->lease->store;

	pthread_mutex_lock(&store->lock);
	iswi_lease_leave(mine->lease);
	pthread_mutex_unlock(&store->lock);
}

static void leave(struct rdma_lease *mine)
{
	pthread_mutex_unlock(&mine->lock);
	leave_unlocked(mine);
}

static atomic_uint *connections(struct rdma_lease *mine)
{
	return &mine->lease->connections[ISW_TRANSPORT_RDMA];
}

/* The functions from here on: lock held. */
static int end_queue_pairs(struct rdma_lease *mine)
{
	struct rdma_domain *domain = mine->domain;
	int code;

	while (domain != NULL && domain->qp_count > 0) {
		code = mine->store->verbs->qp_free(domain->qp[domain->qp_count - 1]);
		if (code != 0)
			return code;
		domain->qp_count--;
		atomic_fetch_sub_explicit(connections(mine), 1, memory_order_relaxed);
	}
	return 0;
}

static int unregister(struct rdma_lease *mine, uint32_t slot)
{
	struct rdma_domain *domain = mine->domain;
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

static int end_all(struct rdma_lease *mine)
{
	struct rdma_domain *domain = mine->domain;
	int code;

	if (domain == NULL)
		return 0;
	code = end_queue_pairs(mine);
	for (uint32_t i = 0; i < mine->lease->slots_max && code == 0; i++)
		code = unregister(mine, i);
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

/* ---------------------------------------------------------------------------- opening */

/* Slabs that are registered for nobody give way to who needs it. */
static int make_region(struct iswi_rdma_store *rdma, struct iswi_vpd *pd, void *memory,
		       uint64_t bytes, unsigned int peer, struct iswi_vmr **mr_out,
		       struct iswi_verbs_key *key_out)
{
	int code = rdma->verbs->mr_make(pd, memory, bytes, peer, mr_out, key_out);

	if (iswi_store_is_limit(code) && iswi_store_ahead_end_one(rdma, false))
		code = rdma->verbs->mr_make(pd, memory, bytes, peer, mr_out, key_out);
	return code;
}

/* What was made is in the domain also when it fails. */
static int make_domain(struct rdma_lease *mine, struct isw_error *error)
{
	const struct iswi_verbs *verbs = mine->store->verbs;
	struct rdma_domain *domain = mine->domain;
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

static int make_queue_pair(struct rdma_lease *mine, const struct isw_rdma_end *peer,
			   struct isw_rdma_end *end_out, struct isw_error *error)
{
	const struct iswi_verbs *verbs = mine->store->verbs;
	struct rdma_domain *domain = mine->domain;
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
		atomic_fetch_add_explicit(connections(mine), 1, memory_order_relaxed);
		code = verbs->qp_connect(qp, &path);
	}
	if (code != 0)
		return iswi_error(error, code, "RDMA device %s can take no further connection: %s",
				  domain->choice.device, strerror(-code));
	return 0;
}

static bool has_registered(const struct rdma_lease *mine)
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
static int begin(struct rdma_lease *mine, const struct iswi_verbs_choice *choice,
		 struct isw_error *error)
{
	isw_store *store = mine->lease->store;
	struct rdma_domain *domain = mine->domain;
	bool open;

	/* A renewal that begins later ends what is made here: it waits for the lock. */
	pthread_mutex_lock(&store->lock);
	open = mine->lease->open;
	pthread_mutex_unlock(&store->lock);
	if (!open)
		return iswi_error(error, -EBUSY, CHANGING);
	if (end_queue_pairs(mine) != 0)
		return iswi_error(error, -EBUSY, CHANGING);
	/* It takes a while to end what is registered there: isw_store_rdma_let_go does. */
	if (domain != NULL && has_registered(mine) && atomic_load(&domain->device->stale))
		return iswi_error(error, -EBUSY,
				  "slabs are still registered with RDMA device %s, which failed or "
				  "is being removed",
				  domain->device->name);
	if (domain != NULL &&
	    (domain->stuck || !iswi_store_device_is(domain->device, choice->device)))
		if (end_all(mine) != 0)
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

int isw_store_rdma_open(isw_store *store, uint64_t id, const struct isw_rdma_end *peers,
			uint32_t count, struct isw_rdma_end *ends_out,
			struct isw_rdma_key *probe_out, struct isw_error *error)
{
	struct iswi_verbs_choice choice;
	struct rdma_lease *mine;
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
	code = begin(mine, &choice, error);
	if (code != 0)
		goto out;
	code = mine->domain->pd != NULL ? 0 : make_domain(mine, error);
	for (uint32_t i = 0; i < count && code == 0; i++)
		code = make_queue_pair(mine, &peers[i], &ends_out[i], error);
	if (code != 0)
		end_all(mine);
	else
		*probe_out = (struct isw_rdma_key){(uintptr_t)mine->domain->probe,
						   mine->domain->probe_rkey};
	if (code == 0)
		iswi_store_device_chosen(mine->store, mine->domain->device);
out:
	leave(mine);
	return code;
}

/* Its consumer hears it from the connections of TCP beside them. */
static int disconnect(struct rdma_lease *mine)
{
	int code = 0;

	pthread_mutex_lock(&mine->lock);
	if (mine->domain != NULL && mine->domain->qp_count > 0) {
		code = end_queue_pairs(mine);
		pthread_mutex_lock(&mine->lease->store->lock);
		iswi_lease_shut(mine->lease);
		pthread_mutex_unlock(&mine->lease->store->lock);
	}
	pthread_mutex_unlock(&mine->lock);
	return code;
}

/*
 * What a lease without connections has registered, slab by slab: a renewal waits for the lock, and
 * the consumer does not wait for long. Who has connected it again meanwhile keeps the rest.
 */
static int end_rest(struct rdma_lease *mine)
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
			code = unregister(mine, slot++);
		} else if (more) {
			code = end_all(mine);
			more = false;
		}
		pthread_mutex_unlock(&mine->lock);
	} while (more && code == 0);
	return code;
}

int isw_store_rdma_close(isw_store *store, uint64_t id)
{
	struct rdma_lease *mine = enter(store, id);
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
 * By a user of the lease's: ends its connections by a device that is leaving, of which its consumer
 * hears; rest: and what it has registered with a device that is stale.
 */
static void let_go(struct rdma_lease *mine, bool rest)
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
static struct rdma_lease *enter_place(isw_store *store, uint32_t number)
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
			struct rdma_lease *mine = enter_place(store, i);

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
	struct rdma_lease *mine = enter(store, id);
	int code;

	if (mine == NULL)
		return -ENOENT;
	code = end_queue_pairs(mine);
	leave(mine);
	return code;
}

/* ------------------------------------------------------------------------------- keys */

/* The slot's memory while it is mapped under that generation. NULL: it is not. */
static void *mapped_memory(struct rdma_lease *mine, uint32_t slot, uint64_t generation)
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

/*
 * What was registered ahead, moved into the lease's domain; NULL: nothing, and what
 * there was is freed. dead_out: it is neither.
 */
static struct iswi_vmr *move_in(struct rdma_lease *mine, struct iswi_vmr *mr,
				struct iswi_store_device *device, struct iswi_verbs_key *key_out,
				bool *dead_out)
{
	const struct iswi_verbs *verbs = mine->store->verbs;
	struct rdma_domain *domain = mine->domain;
	int code = 0;

	*dead_out = false;
	if (mr == NULL)
		return NULL;
	if (device != domain->device) {
		verbs->mr_free(mr); /* else nobody reaches it either */
		mr = NULL;
	} else {
		code = verbs->mr_move(mr, domain->pd, SLAB_PEER, key_out);
		if (code == -EOPNOTSUPP || code == -ENOSYS)
			atomic_store(&device->immovable, true);
		if (code != 0 && verbs->mr_free(mr) == 0)
			mr = NULL;
	}
	*dead_out = mr != NULL && code != 0;
	iswi_store_device_put(mine->store, device); /* the lease is its user */
	return mr;
}

/* The slot is mapped. What was registered ahead is taken, else it is done now. */
static int register_slot(struct rdma_lease *mine, uint32_t slot, void *memory, bool at_hand,
			 struct isw_error *error)
{
	struct rdma_domain *domain = mine->domain;
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

int isw_store_rdma_key(isw_store *store, uint64_t id, uint32_t slot, uint64_t generation,
		       uint32_t at_hand, struct isw_rdma_key *key_out, struct isw_error *error)
{
	struct rdma_lease *mine = enter(store, id);
	struct rdma_domain *domain;
	void *memory;
	int code = 0;

	if (mine == NULL)
		return iswi_error(error, -ENOENT, "no such lease");
	domain = mine->domain;
	/* Without queue pairs a slot's registration may be one that could not be ended. */
	if (domain == NULL || domain->qp_count == 0) {
		code = iswi_error(error, -ENOTCONN, "the lease has no RDMA connections");
		goto out;
	}
	/* An unmap that comes later fences the slot first and then waits for the lock. */
	memory = mapped_memory(mine, slot, generation);
	if (memory == NULL) {
		code = iswi_error(error, -ESTALE, "the slot holds another generation");
		goto out;
	}
	if (domain->slot[slot].mr == NULL)
		code = register_slot(mine, slot, memory, at_hand != 0, error);
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
				connections(share_of(store->leases[i])), memory_order_relaxed);
	stats_out->rdma_regions = iswi_counted(&rdma->regions);
	stats_out->rdma_failures = iswi_counted(&rdma->failures);
}

static int rdma_lease_create(struct iswi_lease *lease, void **part_out)
{
	struct rdma_lease *mine = calloc(1, sizeof(*mine));

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
		atomic_load_explicit(connections(share_of(lease)), memory_order_relaxed);
}

static int rdma_lease_end(struct iswi_lease *lease, bool pause)
{
	struct rdma_lease *mine = share_of(lease);
	int code;

	pthread_mutex_lock(&mine->lock);
	code = pause ? end_queue_pairs(mine) : end_all(mine);
	pthread_mutex_unlock(&mine->lock);
	return code;
}

static int rdma_slot_end(struct iswi_lease *lease, uint32_t slot, bool forced)
{
	struct rdma_lease *mine = share_of(lease);
	int code = 0, ended = 0;
	bool connected;

	pthread_mutex_lock(&mine->lock);
	if (mine->domain == NULL)
		goto out;
	connected =
		mine->domain->qp_count > 0; /* else pages go over TCP, which has its own fence */
	/*
	 * A request that is still on its way must not meet the slot's next slab, whose key a device
	 * may make the same. The consumer hears it from the TCP connection beside them.
	 */
	if (forced)
		ended = end_queue_pairs(mine);
	code = unregister(mine, slot);
	if (code == 0 && ended == 0 && !(forced && connected))
		goto out;
	/* A device that keeps a registration keeps it from nobody when the connections are gone. */
	code = end_queue_pairs(mine);
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
