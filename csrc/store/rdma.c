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

#include "store/store.h"
#include "verbs/verbs.h"

#define SLAB_PEER  (ISWI_VERBS_PEER_READS | ISWI_VERBS_PEER_WRITES)
#define CHANGING   "the lease's connections are just being changed"
#define CQ_ENTRIES 16u /* nothing is ever posted on a donor's queue pair */

struct iswi_store_rdma {
	struct iswi_verbs_choice choice;
	struct iswi_store_device *device;
	struct iswi_vpd *pd;
	struct iswi_vcq *cq;
	struct iswi_vqp *qp[ISW_RDMA_QUEUES_MAX];
	uint32_t qp_count;
	bool stuck; /* a registration could not be ended: no connection is made in this domain again
		     */
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

/* Both of a lease's locks are free. NULL: there is no such lease. */
static struct iswi_lease *enter(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease != NULL)
		iswi_lease_enter(lease);
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
	iswi_lease_leave(lease);
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

/* rdma_lock held. */
static void unregistered(struct iswi_lease *lease, uint32_t slot)
{
	struct iswi_store_rdma *rdma = lease->rdma;

	rdma->slot[slot].mr = NULL;
	atomic_fetch_sub_explicit(&lease->store->rdma_regions, 1, memory_order_relaxed);
	if (!rdma->slot[slot].left)
		iswi_slab_ahead_leave(lease->store, lease->slots[slot].slab);
	rdma->slot[slot].left = rdma->slot[slot].dead = false;
}

static int unregister(struct iswi_lease *lease, uint32_t slot)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	struct iswi_vmr *mr = rdma->slot[slot].mr;
	int code;

	if (mr == NULL)
		return 0;
	rdma->slot[slot].dead = true;
	code = verbs->mr_free(mr);
	if (code != 0) {
		rdma->stuck = true;
		return code;
	}
	unregistered(lease, slot);
	return 0;
}

/* rdma_lock held. */
static int end_all(struct iswi_lease *lease)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	int code;

	if (rdma == NULL)
		return 0;
	code = end_queue_pairs(lease);
	for (uint32_t i = 0; i < lease->slots_max && code == 0; i++)
		code = unregister(lease, i);
	if (code == 0 && rdma->probe_mr != NULL)
		code = verbs->mr_free(rdma->probe_mr);
	if (code != 0)
		return code; /* it all stays, and so does the memory behind it */
	if (rdma->cq != NULL)
		verbs->cq_free(rdma->cq);
	if (rdma->pd != NULL)
		verbs->pd_free(rdma->pd);
	if (rdma->device != NULL)
		iswi_store_device_put(lease->store, rdma->device);
	free(rdma->probe);
	free(rdma);
	lease->rdma = NULL;
	return 0;
}

int iswi_lease_rdma_end(struct iswi_lease *lease)
{
	int code;

	pthread_mutex_lock(&lease->rdma_lock);
	code = end_all(lease);
	pthread_mutex_unlock(&lease->rdma_lock);
	return code;
}

int iswi_lease_rdma_pause(struct iswi_lease *lease)
{
	int code = 0;

	pthread_mutex_lock(&lease->rdma_lock);
	if (lease->rdma != NULL)
		code = end_queue_pairs(lease);
	pthread_mutex_unlock(&lease->rdma_lock);
	return code;
}

int iswi_slot_rdma_end(struct iswi_lease *lease, uint32_t slot, bool forced)
{
	int code = 0, ended = 0;
	bool connected;

	pthread_mutex_lock(&lease->rdma_lock);
	if (lease->rdma == NULL)
		goto out;
	connected = lease->rdma->qp_count > 0; /* else pages go over TCP, which has its own fence */
	/*
	 * A request that is still on its way must not meet the slot's next slab, whose key a device
	 * may make the same. The consumer hears it from the TCP connection beside them.
	 */
	if (forced)
		ended = end_queue_pairs(lease);
	code = unregister(lease, slot);
	if (code == 0 && ended == 0 && !(forced && connected))
		goto out;
	/* A device that keeps a registration keeps it from nobody when the connections are gone. */
	code = end_queue_pairs(lease);
	lease->rdma->slot[slot].left = lease->rdma->slot[slot].mr != NULL && code == 0;
	pthread_mutex_lock(&lease->store->lock);
	iswi_lease_shut(lease);
	pthread_mutex_unlock(&lease->store->lock);
out:
	pthread_mutex_unlock(&lease->rdma_lock);
	return code;
}

/* ---------------------------------------------------------------------------- opening */

/* Slabs that are registered for nobody give way to who needs it. */
static int make_region(isw_store *store, struct iswi_vpd *pd, void *memory, uint64_t bytes,
		       unsigned int peer, struct iswi_vmr **mr_out, struct iswi_verbs_key *key_out)
{
	int code = store->verbs->mr_make(pd, memory, bytes, peer, mr_out, key_out);

	if (iswi_store_is_limit(code) && iswi_store_ahead_spare(store))
		code = store->verbs->mr_make(pd, memory, bytes, peer, mr_out, key_out);
	return code;
}

/* rdma_lock held. What was made is lease->rdma's also when it fails. */
static int make_domain(struct iswi_lease *lease, struct isw_error *error)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	struct iswi_verbs_key key;
	int code = iswi_store_device_get(lease->store, rdma->choice.device, &rdma->device, error);

	if (code != 0)
		return code;
	code = verbs->pd_make(rdma->device->dev, &rdma->pd);
	if (code == 0)
		code = verbs->cq_make(rdma->device->dev, CQ_ENTRIES, &rdma->cq, NULL);
	if (code == 0) {
		rdma->probe = aligned_alloc(ISW_PAGE_BYTES, ISW_PAGE_BYTES);
		code = rdma->probe == NULL ? -ENOMEM : 0;
	}
	if (code == 0) {
		memset(rdma->probe, 0, ISW_PAGE_BYTES);
		code = make_region(lease->store, rdma->pd, rdma->probe, ISW_PAGE_BYTES,
				   ISWI_VERBS_PEER_READS, &rdma->probe_mr, &key);
	}
	if (code != 0) {
		iswi_store_device_failed(rdma->device, code);
		return iswi_error(error, code, "RDMA device %s can serve no further lease: %s",
				  rdma->choice.device, strerror(-code));
	}
	rdma->probe_rkey = key.remote;
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

/* rdma_lock held. */
static bool has_registered(const struct iswi_lease *lease)
{
	for (uint32_t i = 0; i < lease->slots_max; i++)
		if (lease->rdma->slot[i].mr != NULL)
			return true;
	return false;
}

/*
 * rdma_lock held. The connections of before are ended; what is registered stays, where it is of use
 * to those that come. On success lease->rdma is there, perhaps without anything in it.
 */
static int begin(struct iswi_lease *lease, const struct iswi_verbs_choice *choice,
		 struct isw_error *error)
{
	isw_store *store = lease->store;
	struct iswi_store_rdma *rdma = lease->rdma;
	bool open;

	/* A renewal that begins later ends what is made here: it waits for the lock. */
	pthread_mutex_lock(&store->lock);
	open = lease->open;
	pthread_mutex_unlock(&store->lock);
	if (!open)
		return iswi_error(error, -EBUSY, CHANGING);
	if (rdma != NULL && end_queue_pairs(lease) != 0)
		return iswi_error(error, -EBUSY, CHANGING);
	/* It takes a while to end what is registered there: isw_store_rdma_let_go does. */
	if (rdma != NULL && has_registered(lease) && atomic_load(&rdma->device->stale))
		return iswi_error(error, -EBUSY,
				  "slabs are still registered with RDMA device %s, which failed or "
				  "is being removed",
				  rdma->device->name);
	if (rdma != NULL && (rdma->stuck || !iswi_store_device_is(rdma->device, choice->device)))
		if (end_all(lease) != 0)
			return iswi_error(error, -EBUSY, CHANGING);
	if (lease->rdma == NULL)
		lease->rdma = calloc(1, sizeof(*lease->rdma) +
						lease->slots_max * sizeof(lease->rdma->slot[0]));
	if (lease->rdma == NULL)
		return iswi_error(error, -ENOMEM, "no memory for RDMA");
	lease->rdma->choice = *choice;
	return 0;
}

int isw_store_rdma_open(isw_store *store, uint64_t id, const struct isw_rdma_end *peers,
			uint32_t count, struct isw_rdma_end *ends_out,
			struct isw_rdma_key *probe_out, struct isw_error *error)
{
	struct iswi_verbs_choice choice;
	struct iswi_lease *lease;
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
	code = begin(lease, &choice, error);
	if (code != 0)
		goto out;
	code = lease->rdma->pd != NULL ? 0 : make_domain(lease, error);
	for (uint32_t i = 0; i < count && code == 0; i++)
		code = make_queue_pair(lease, &peers[i], &ends_out[i], error);
	if (code != 0)
		end_all(lease);
	else
		*probe_out = (struct isw_rdma_key){(uintptr_t)lease->rdma->probe,
						   lease->rdma->probe_rkey};
	if (code == 0)
		iswi_store_device_chosen(store, lease->rdma->device);
out:
	leave(lease);
	return code;
}

/* Its consumer hears it from the connections of TCP beside them. */
static int disconnect(struct iswi_lease *lease)
{
	int code = 0;

	pthread_mutex_lock(&lease->rdma_lock);
	if (lease->rdma != NULL && lease->rdma->qp_count > 0) {
		code = end_queue_pairs(lease);
		pthread_mutex_lock(&lease->store->lock);
		iswi_lease_shut(lease);
		pthread_mutex_unlock(&lease->store->lock);
	}
	pthread_mutex_unlock(&lease->rdma_lock);
	return code;
}

/*
 * What a lease without connections has registered, slab by slab: a renewal waits for rdma_lock, and
 * the consumer does not wait for long. Who has connected it again meanwhile keeps the rest.
 */
static int end_rest(struct iswi_lease *lease)
{
	uint32_t slot = 0;
	int code = 0;
	bool more;

	do {
		pthread_mutex_lock(&lease->rdma_lock);
		more = lease->rdma != NULL && lease->rdma->qp_count == 0;
		while (more && slot < lease->slots_max && lease->rdma->slot[slot].mr == NULL)
			slot++;
		if (more && slot < lease->slots_max) {
			code = unregister(lease, slot++);
		} else if (more) {
			code = end_all(lease);
			more = false;
		}
		pthread_mutex_unlock(&lease->rdma_lock);
	} while (more && code == 0);
	return code;
}

int isw_store_rdma_close(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease = enter(store, id);
	int code;

	if (lease == NULL)
		return -ENOENT;
	pthread_mutex_unlock(&lease->rdma_lock);
	code = disconnect(lease);
	if (code == 0)
		code = end_rest(lease);
	pthread_mutex_lock(&lease->rdma_lock);
	leave(lease);
	return code;
}

void iswi_lease_rdma_let_go(struct iswi_lease *lease, bool rest)
{
	const struct iswi_store_device *device;
	bool leaving = false, stale = false;

	pthread_mutex_lock(&lease->rdma_lock);
	device = lease->rdma != NULL ? lease->rdma->device : NULL;
	if (device != NULL) {
		leaving = atomic_load(&device->leaving);
		stale = atomic_load(&device->stale);
	}
	pthread_mutex_unlock(&lease->rdma_lock);
	/* What cannot be ended is tried again with the next call. */
	if (leaving && !rest)
		disconnect(lease);
	else if (stale && rest)
		end_rest(lease);
}

int isw_store_rdma_pause(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease = enter(store, id);
	int code = 0;

	if (lease == NULL)
		return -ENOENT;
	if (lease->rdma != NULL)
		code = end_queue_pairs(lease);
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

/*
 * rdma_lock held. What was registered ahead, moved into the lease's domain; NULL: nothing, and what
 * there was is freed. dead_out: it is neither.
 */
static struct iswi_vmr *move_in(struct iswi_lease *lease, struct iswi_vmr *mr,
				struct iswi_store_device *device, struct iswi_verbs_key *key_out,
				bool *dead_out)
{
	const struct iswi_verbs *verbs = lease->store->verbs;
	struct iswi_store_rdma *rdma = lease->rdma;
	int code = 0;

	*dead_out = false;
	if (mr == NULL)
		return NULL;
	if (device != rdma->device) {
		verbs->mr_free(mr); /* else nobody reaches it either */
		mr = NULL;
	} else {
		code = verbs->mr_move(mr, rdma->pd, SLAB_PEER, key_out);
		if (code == -EOPNOTSUPP || code == -ENOSYS)
			atomic_store(&device->immovable, true);
		if (code != 0 && verbs->mr_free(mr) == 0)
			mr = NULL;
	}
	*dead_out = mr != NULL && code != 0;
	iswi_store_device_put(lease->store, device); /* the lease is its user */
	return mr;
}

/* rdma_lock held, the slot is mapped. What was registered ahead is taken, else it is done now. */
static int register_slot(struct iswi_lease *lease, uint32_t slot, void *memory, bool at_hand,
			 struct isw_error *error)
{
	struct iswi_store_rdma *rdma = lease->rdma;
	uint32_t slab = lease->slots[slot].slab;
	isw_store *store = lease->store;
	struct iswi_store_device *device;
	struct iswi_verbs_key key = {0};
	struct iswi_vmr *mr;
	int code = iswi_slab_ahead_take(store, slab, at_hand ? rdma->device : NULL, &mr, &device);

	if (code != 0)
		return code;
	mr = move_in(lease, mr, device, &key, &rdma->slot[slot].dead);
	if (mr == NULL && at_hand) {
		iswi_slab_ahead_leave(store, slab);
		return -EAGAIN;
	}
	if (mr == NULL)
		code = make_region(store, rdma->pd, memory, store->config.slab_bytes, SLAB_PEER,
				   &mr, &key);
	if (code == 0) {
		rdma->slot[slot].mr = mr;
		rdma->slot[slot].rkey = key.remote;
		atomic_fetch_add_explicit(&store->rdma_regions, 1, memory_order_relaxed);
		return 0;
	}
	iswi_slab_ahead_leave(store, slab);
	atomic_fetch_add_explicit(&store->rdma_failures, 1, memory_order_relaxed);
	iswi_store_device_failed(rdma->device, code);
	return iswi_error(error, code, "a slab cannot be registered with RDMA device %s: %s%s",
			  rdma->choice.device, strerror(-code),
			  code == -ENOMEM ? " (ulimit -l, LimitMEMLOCK=infinity)" : "");
}

int isw_store_rdma_key(isw_store *store, uint64_t id, uint32_t slot, uint64_t generation,
		       uint32_t at_hand, struct isw_rdma_key *key_out, struct isw_error *error)
{
	struct iswi_lease *lease = enter(store, id);
	struct iswi_store_rdma *rdma;
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
	if (rdma->slot[slot].mr == NULL)
		code = register_slot(lease, slot, memory, at_hand != 0, error);
	if (code == 0 && rdma->slot[slot].dead)
		code = iswi_error(error, -EIO, "the slab's registration could not be ended");
	if (code == 0)
		*key_out = (struct isw_rdma_key){(uintptr_t)memory, rdma->slot[slot].rkey};
out:
	leave(lease);
	return code;
}

void iswi_store_verbs_set(isw_store *store, const struct iswi_verbs *verbs)
{
	store->verbs = verbs;
}
