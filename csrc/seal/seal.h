/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sealing: AES-256-GCM (NIST SP 800-38D) with nonces of 96 bits and tags of 128 bits, behind one
 * table that each cryptographic library implements.
 *
 * A sealer holds several keys, each at a number of its own. Everything it needs is allocated by
 * make: keying, sealing and opening neither allocate nor wait for another thread.
 */
#ifndef ISWI_SEAL_SEAL_H
#define ISWI_SEAL_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "isw.h"

#define ISWI_SEAL_KEY_BYTES   32u
#define ISWI_SEAL_NONCE_BYTES 12u
#define ISWI_SEAL_TAG_BYTES   16u

struct iswi_sealer; /* of the library that made it */

/* What is sealed or opened; `in` and `out` may be the same memory. All borrowed. */
struct iswi_sealing {
	uint32_t key; /* its number */
	unsigned char nonce[ISWI_SEAL_NONCE_BYTES];
	const void *data; /* authenticated, not sealed */
	size_t data_bytes;
	const void *in;
	void *out;
	size_t bytes;
};

/* All members are required. Each library's table is immutable. */
struct iswi_seal_ops {
	const char *name;
	/*
	 * A sealer with room for so many keys. Its memory is left out of core dumps and of
	 * children. Any thread, may block. -ENOENT: this host lacks the library; -ENOTSUP: library
	 * or processor lacks something; -ENOMEM.
	 */
	int (*make)(uint32_t keys, struct iswi_sealer **sealer_out);
	/* Accepts NULL. Keys are overwritten. */
	void (*destroy)(struct iswi_sealer *sealer);
	/* Copies the key. While nobody uses this number. */
	void (*set_key)(struct iswi_sealer *sealer, uint32_t number, const unsigned char *key);
	/* Any number of threads at once. */
	void (*seal)(struct iswi_sealer *sealer, const struct iswi_sealing *what,
		     unsigned char *tag_out);
	/* Likewise. False: the bytes are not what was sealed, and `out` is zeros. */
	bool (*open)(struct iswi_sealer *sealer, const struct iswi_sealing *what,
		     const unsigned char *tag);
};

/* The libraries of this build, whether they work here or not; a NULL ends the list. */
const struct iswi_seal_ops *const *iswi_seal_libraries(void);
/* What iswi_seal_choose does, among these. */
const struct iswi_seal_ops *iswi_seal_fastest(const struct iswi_seal_ops *const *libraries,
					      struct isw_error *error);

#ifdef ISW_HAVE_OPENSSL
extern const struct iswi_seal_ops iswi_seal_openssl;
#endif
#ifdef ISW_HAVE_IPSEC_MB
extern const struct iswi_seal_ops iswi_seal_ipsec_mb;
#endif

/*
 * The fastest of the libraries that this build and this host have, among those that pass a
 * self-test with published vectors. NULL: there is none, and the error says what to install.
 * Takes a few milliseconds; any thread, may block.
 */
const struct iswi_seal_ops *iswi_seal_choose(struct isw_error *error);

/* The key behind the descriptor; the caller forgets it. -EBADF: there is none. */
int iswi_seal_key_read(int32_t fd, unsigned char *key_out, struct isw_error *error);
/* Keeps its memory locked until it is let go. -EBADF. let_go accepts NULL. */
int iswi_seal_key_hold(int32_t fd, void **held_out, struct isw_error *error);
void iswi_seal_key_let_go(void *held);
/* Compares without telling by its duration where the difference is. */
bool iswi_seal_tags_equal(const unsigned char *a, const unsigned char *b);
/* Zeros that the compiler does not leave out. */
void iswi_seal_forget(void *secret, size_t bytes);

/*
 * Zeroed memory for a sealer: whole pages, left out of core dumps and of children, and locked where
 * the limits allow that (a device locks all of its memory by itself). May block.
 */
int iswi_seal_memory_make(size_t bytes, void **memory_out);
/* Overwrites it first. */
void iswi_seal_memory_end(void *memory, size_t bytes);

#endif
