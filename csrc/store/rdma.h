/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store by RDMA. rdma_device.c: the donor's RDMA devices. rdma_ahead.c: slabs registered before
 * somebody waits for them. rdma_lease.c: what a lease has. rdma.c: the calls of the public header,
 * and the table that the store calls.
 *
 * Locks, before the store's own (store.h):
 *   0. a lease's lock: its RDMA connections and keys. Held while memory is registered, by
 *      a call that counts among the lease's users.
 *   0b. devices_lock: RDMA devices. Held while one is opened or closed.
 */
#ifndef ISWI_STORE_RDMA_H
#define ISWI_STORE_RDMA_H

#include "store/store.h"
#include "verbs/verbs.h"

extern const struct iswi_store_transport iswi_store_rdma;

#define ISWI_STORE_DEVICES_MAX 4u

/*
 * An RDMA device that is opened once for all leases and slabs that use it, and closed with the
 * last. Under devices_lock but for the flags; name, dev and spare do not change while there is a
 * user.
 */
struct iswi_store_device {
	char name[ISW_RDMA_NAME_BYTES];
	struct iswi_vdev *dev;
	struct iswi_vpd *spare; /* has no queue pair: nobody reaches what is registered there */
	uint32_t users;         /* 0: the place is free */
	atomic_bool stale;      /* it failed: the next user opens the device again */
	atomic_bool immovable;  /* it cannot move a registration: nothing is registered ahead */
	atomic_bool leaving;    /* likewise stale: whoever uses it stops */
};

/* Under store->lock. */
struct iswi_rdma_slab {
	struct iswi_vmr *ahead; /* its registration for nobody; NULL: none */
	struct iswi_store_device *device;
	bool registering; /* a call is registering it, or ending that; it holds the slab
			     (iswi_store_slab.holds) */
	bool lent;        /* registered for a lease */
};

/* RDMA's share of a store. */
struct iswi_rdma_store {
	isw_store *store;
	const struct iswi_verbs *verbs;
	/* Relaxed: statistics. */
	atomic_uint_fast64_t regions, failures;
	pthread_mutex_t devices_lock;
	struct iswi_store_device devices[ISWI_STORE_DEVICES_MAX];
	char ahead_name[ISW_RDMA_NAME_BYTES]; /* where slabs are registered ahead; empty: nowhere */
	bool ahead_guessed;                   /* no lease has used it so far */
	struct iswi_rdma_slab *slabs;         /* slabs_size */
};

static inline struct iswi_rdma_store *iswi_rdma_of(const isw_store *store)
{
	return store->parts[ISW_TRANSPORT_RDMA];
}

/* ---- rdma_device.c: blocking */
/* -ENOSPC: too many are in use; or errors of opening it. */
int iswi_store_device_get(struct iswi_rdma_store *rdma, const char *name,
			  struct iswi_store_device **device_out, struct isw_error *error);
void iswi_store_device_put(struct iswi_rdma_store *rdma, struct iswi_store_device *device);
/* A lease's connections go through this device: slabs are now registered ahead there. */
void iswi_store_device_chosen(struct iswi_rdma_store *rdma, const struct iswi_store_device *device);
/* Whether the device has that name and has not failed. */
bool iswi_store_device_is(const struct iswi_store_device *device, const char *name);
/* The device failed with `code`: it may have been removed, and come back under the same name. */
void iswi_store_device_failed(struct iswi_store_device *device, int code);
/* Whether the code means a limit of the host, its cgroup or the device, which is no failure. */
bool iswi_store_is_limit(int code);
/*
 * Marks the devices that the host is removing; returns how many are new. any_out: whether
 * any device in use is stale.
 */
uint32_t iswi_store_devices_look(struct iswi_rdma_store *rdma, bool *any_out);

/* ---- rdma_ahead.c: no lock but a lease's is held; blocking */
/*
 * Takes the slab's registration ahead, for a lease that has it mapped, and with it one use of its
 * device. *mr_out NULL: there was none. at_hand: waits for nothing; -EAGAIN unless the slab is
 * registered with this device, which can move it. NULL: any device, and waits.
 */
int iswi_slab_ahead_take(struct iswi_rdma_store *rdma, uint32_t slab,
			 const struct iswi_store_device *at_hand, struct iswi_vmr **mr_out,
			 struct iswi_store_device **device_out);
/* The lease does not use the slab by RDMA any longer. */
void iswi_slab_ahead_leave(struct iswi_rdma_store *rdma, uint32_t slab);
/* Ends the slab's registration ahead, if there is one. Nobody else uses the slab. */
void iswi_slab_ahead_end(struct iswi_rdma_store *rdma, uint32_t slab);
/* Ends one slab's registration ahead; leaving_only: with a leaving device. false: there is none. */
bool iswi_store_ahead_end_one(struct iswi_rdma_store *rdma, bool leaving_only);

/* A lease's protection domain, with its connections and the registrations of its slabs. */
struct iswi_lease_domain {
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
		bool left; /* the connections have ended, and the slot's slab is another by now */
	} slot[];          /* slots_max */
};

/* RDMA's share of a lease. */
struct iswi_rdma_lease {
	struct iswi_lease *lease;
	struct iswi_rdma_store *store;
	pthread_mutex_t lock;
	struct iswi_lease_domain *domain; /* under lock; NULL: there is none */
};

static inline atomic_uint *iswi_rdma_connections(struct iswi_rdma_lease *mine)
{
	return &mine->lease->connections[ISW_TRANSPORT_RDMA];
}

/* ---- rdma_lease.c: the lease's lock held; blocking */
int iswi_rdma_end_queue_pairs(struct iswi_rdma_lease *mine);
/* Ends the slot's registration, if there is one. */
int iswi_rdma_unregister(struct iswi_rdma_lease *mine, uint32_t slot);
/* After an error all of it stays, and so must the memory behind it. */
int iswi_rdma_end_all(struct iswi_rdma_lease *mine);
/*
 * Ends the previous connections and keeps what is registered, where the next ones can use it. On
 * success the domain is there, perhaps without anything in it.
 */
int iswi_rdma_begin(struct iswi_rdma_lease *mine, const struct iswi_verbs_choice *choice,
		    struct isw_error *error);
/* After an error the domain has what was made until then. */
int iswi_rdma_make_domain(struct iswi_rdma_lease *mine, struct isw_error *error);
int iswi_rdma_make_queue_pair(struct iswi_rdma_lease *mine, const struct isw_rdma_end *peer,
			      struct isw_rdma_end *end_out, struct isw_error *error);
/* The slot is mapped. Takes its slab's registration ahead, or else registers it now. */
int iswi_rdma_register(struct iswi_rdma_lease *mine, uint32_t slot, void *memory, bool at_hand,
		       struct isw_error *error);

#endif
