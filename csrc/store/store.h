/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The donor store's inside. pool.c: slabs and the store itself. lease.c: leases and their slots.
 * export.c: what the NBD server asks. rdma.c: the same memory by RDMA. restore.c: what a
 * predecessor left in the directory of slabs.
 *
 * A slab goes round: made (zeroed) → free → mapped in a lease's slot → dirty → zeroed → free.
 *
 * The fence. The page path takes no lock. A request raises the slot's refs FIRST and looks at its
 * word AFTER; unmap changes the word FIRST and waits for refs to be zero AFTER; all four are
 * sequentially consistent. So either the request sees the fence and lets go, or unmap sees the
 * request and waits. Only then does the slot's memory become somebody else's.
 *
 * The slot itself is a name for another slab of the same device then. A request that was sent
 * before the fence and arrives after that would meet that slab. After DONE there is none; a slot
 * that was taken without it stays empty until the connections that could bring one have ended.
 */
#ifndef ISWI_STORE_H
#define ISWI_STORE_H

#include "store/slab_dir.h"
#include "store/slab_mem.h"
#include "util/util.h"
#include "verbs/verbs.h"
#include "wire/nbd_server.h"

#define ISWI_STORE_SLABS_MAX  65536u /* a bound on configuration, not a target */
#define ISWI_STORE_SLOTS_MAX  65536u /* of one lease */
#define ISWI_STORE_LEASES_MAX 65536u
#define ISWI_TOKEN_BYTES      32u /* 128 bits in hexadecimal */
#define ISWI_STORE_NOTES_MAX  16u

enum iswi_slab_state {
	ISWI_SLAB_NONE, /* no memory */
	ISWI_SLAB_MAKING,
	ISWI_SLAB_FREE, /* zeroed */
	ISWI_SLAB_MAPPED,
	ISWI_SLAB_DIRTY,
	ISWI_SLAB_ZEROING,
	ISWI_SLAB_FREEING,
	ISWI_SLAB_ORPHAN, /* of a predecessor's lease that is not restored (yet) */
};

struct iswi_store_slab {
	struct iswi_slab_mem mem;
	enum iswi_slab_state state;
	struct iswi_slab_name name;
	bool pinning;    /* its memory must not go */
	bool pin_failed; /* once is enough */
	/* rdma_ahead.c: registered, for nobody; NULL: it is not. */
	struct iswi_vmr *ahead;
	struct iswi_store_device *ahead_device;
	bool registering; /* just now, ahead: its memory must not go */
	bool lent;        /* registered for a lease */
};

/* A slot's word: its generation above, its state in the lowest bits. */
#define ISWI_SLOT_EMPTY      0u
#define ISWI_SLOT_MAPPED     1u
#define ISWI_SLOT_FENCED     2u
#define ISWI_SLOT_STATE_MASK 3u
#define ISWI_SLOT_STATE_BITS 2

struct iswi_slot {
	/* Written under store->lock. Pair: refs, see the fence above. */
	_Alignas(64) atomic_uint_fast64_t word;
	/* Requests that use memory, or are about to find out that they may not. Pair: word. */
	atomic_uint_fast32_t refs;
	uint32_t slab;
	uint32_t tag;
	char *memory;    /* changed only while no request can hold the slot */
	uint64_t barred; /* empty, but not to be used before connections up to this number are gone
			  */
};

/* One connection bound to a lease. */
struct iswi_store_conn {
	struct iswi_lease *lease;
	struct iswi_nbd_conn *conn;
	uint64_t number; /* of the lease's, in their order, from 1 */
	struct iswi_store_conn *next;
	struct iswi_store_conn **link; /* what points here */
};

struct iswi_store_rdma; /* rdma.c */

/*
 * An RDMA device that is opened once for all leases and slabs that use it, and closed with the
 * last. Under devices_lock but for the flags; name, dev and spare do not change while there is a
 * user.
 */
struct iswi_store_device {
	char name[ISW_RDMA_NAME_BYTES];
	struct iswi_vdev *dev;
	struct iswi_vpd *spare; /* has no queue pair: what is registered there nobody reaches */
	uint32_t users;         /* 0: the place is free */
	atomic_bool stale;      /* it failed: opened anew for the next that asks */
	atomic_bool immovable;  /* it cannot move a registration: nothing is registered ahead */
	atomic_bool leaving;    /* likewise stale: whoever uses it stops */
};

#define ISWI_STORE_DEVICES_MAX 4u

struct iswi_lease {
	uint64_t id;
	struct isw_store *store;
	pthread_mutex_t rdma_lock;
	struct iswi_store_rdma *rdma; /* under rdma_lock; NULL: there is none */
	atomic_uint rdma_connections; /* relaxed: a statistic */
	char token[ISW_TOKEN_TEXT_BYTES];
	bool open;      /* new connections with the token are welcome */
	bool renewing;  /* one at a time */
	bool dying;     /* being destroyed: to everybody else it is not there */
	bool stuck;     /* likewise: its RDMA device keeps something of it */
	uint32_t users; /* calls that wait with the lock dropped and come back to the lease */
	uint64_t epoch;
	uint32_t slots_max;
	uint32_t slots_mapped;
	uint32_t slot_next; /* where to look for an empty slot: reuse comes as late as it can */
	uint32_t conn_count;
	uint64_t conn_last;
	struct iswi_store_conn *conns;
	struct iswi_nbd_counters counters;
	struct iswi_slot slots[];
};

/*
 * Locks, in the order in which they are taken:
 *   0. a lease's rdma_lock: its RDMA connections and keys. Held while memory is registered, by a
 *      call that counts among the lease's users.
 *   0b. devices_lock: RDMA devices. Held while one is opened or closed.
 *   1. lock: everything here, in leases, and slot words for writing. Never held while memory is
 *      made, zeroed or freed, nor while anything is received or sent; held while a slab's file is
 *      renamed, which on a tmpfs waits for nothing.
 *   2. the server's own (inside iswi_nbd_server_*).
 * iswi_nbd_conn_shutdown takes none and is called with lock held: that a connection is in its
 * lease's list is what keeps it alive.
 */
struct isw_store {
	struct isw_store_config config;
	pthread_mutex_t lock;
	/*
	 * Broadcast: a fenced slot's refs reached 0, a connection left, users changed, a slab is
	 * not being registered any more.
	 */
	pthread_cond_t changed;
	struct iswi_nbd_server *server;
	const struct iswi_verbs *verbs;
	/* Relaxed: statistics. */
	atomic_uint_fast64_t rdma_regions, rdma_failures;
	pthread_mutex_t devices_lock;
	struct iswi_store_device devices[ISWI_STORE_DEVICES_MAX];
	char ahead_name[ISW_RDMA_NAME_BYTES]; /* where slabs are registered ahead; empty: nowhere */
	bool ahead_guessed;                   /* no lease has used it so far */
	struct iswi_slab_dir dir;
	struct iswi_store_slab *slabs; /* slabs_size places: slabs_max, or what was found */
	uint32_t slabs_size;
	struct iswi_lease **leases; /* leases_max places */
	uint64_t lease_last;
	uint64_t generation_last; /* of any slot: none is ever repeated, by a successor neither */
	uint64_t serial_last;
	struct isw_error notes[ISWI_STORE_NOTES_MAX];
	uint32_t note_count; /* all; those past the last are not kept */
};

extern const struct iswi_nbd_backend iswi_store_backend;

/* ---- pool.c */
/* store->lock held, or nobody else there: the next of *last, one that was never used. */
int iswi_store_number(struct isw_store *store, uint64_t *last, uint64_t *number_out);
/* store->lock held: nobody reaches the slab's memory any more. */
void iswi_slab_retire(struct isw_store *store, struct iswi_store_slab *slab);

/* ---- restore.c */
/* Takes over what is in store->dir, and allocates store->slabs. Nobody else knows the store yet. */
int iswi_store_restore(struct isw_store *store, struct isw_error *error);

/* ---- lease.c */
/* A lease that nobody can connect to. NULL: no memory. */
struct iswi_lease *iswi_lease_alloc(struct isw_store *store, uint32_t slots_max);
/* store->lock held from here on. */
/* false: leases_max are there. */
bool iswi_lease_insert(struct isw_store *store, struct iswi_lease *lease);
struct iswi_lease *iswi_lease_find(struct isw_store *store, uint64_t id);
/* One user more, one less: while there is one the lease is not freed. */
void iswi_lease_enter(struct iswi_lease *lease);
void iswi_lease_leave(struct iswi_lease *lease);
/* No lock held: the rest of a lease that was destroyed, at that place, if it is stuck. */
void iswi_lease_destroy_again(struct isw_store *store, uint32_t number);
/* Shuts each of its connections down; their threads end on their own. */
void iswi_lease_shut(struct iswi_lease *lease);
/* No request holds the slot: its slab becomes dirty. */
void iswi_slot_empty(struct iswi_lease *lease, struct iswi_slot *slot);

/* ---- rdma.c: no lock held; blocking */
/*
 * Ends a lease's queue pairs, then every key. An error: some of that is still there, so nothing
 * that it reached may become somebody else's.
 */
int iswi_lease_rdma_end(struct iswi_lease *lease);
/* Likewise its queue pairs only. */
int iswi_lease_rdma_pause(struct iswi_lease *lease);
/*
 * After the slot was fenced: from now on nobody reaches its memory by RDMA. forced: its owner may
 * still be sending there, so all the lease's connections end. An error: as above.
 */
int iswi_slot_rdma_end(struct iswi_lease *lease, uint32_t slot, bool forced);

/*
 * By a user of the lease's: ends its connections by a device that is leaving, and its consumer
 * hears it; rest: and what it has registered with a device that is stale.
 */
void iswi_lease_rdma_let_go(struct iswi_lease *lease, bool rest);

/* ---- rdma_ahead.c: no lock but a lease's rdma_lock held; blocking */
/* -ENOSPC: too many are in use; or errors of opening it. */
int iswi_store_device_get(struct isw_store *store, const char *name,
			  struct iswi_store_device **device_out, struct isw_error *error);
void iswi_store_device_put(struct isw_store *store, struct iswi_store_device *device);
/* A lease's connections go through it: slabs are registered ahead there. */
void iswi_store_device_chosen(struct isw_store *store, const struct iswi_store_device *device);
/* Whether it is the device of that name, and has not failed. */
bool iswi_store_device_is(const struct iswi_store_device *device, const char *name);
/* What it was asked for it could not do: it may have been removed, and be there again. */
void iswi_store_device_failed(struct iswi_store_device *device, int code);
/* Of the host, its cgroup or the device: no failure. */
bool iswi_store_is_limit(int code);
/*
 * The slab's registration ahead, for a lease that has it mapped; the caller holds its device then.
 * NULL in *mr_out: it has none. at_hand: the device with which it must be and that can move it;
 * -EAGAIN: it is not, or is just being registered. NULL: any.
 */
int iswi_slab_ahead_take(struct isw_store *store, uint32_t slab,
			 const struct iswi_store_device *at_hand, struct iswi_vmr **mr_out,
			 struct iswi_store_device **device_out);
/* The lease has no registration of it any more. */
void iswi_slab_ahead_leave(struct isw_store *store, uint32_t slab);
/* Before the slab's memory goes: nobody else uses the slab. */
void iswi_slab_ahead_end(struct isw_store *store, struct iswi_store_slab *slab);
/* Ends any one slab's registration ahead, for somebody who needs the room. false: there is none. */
bool iswi_store_ahead_spare(struct isw_store *store);

#endif
