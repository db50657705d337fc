/* SPDX-License-Identifier: Apache-2.0 */
/* Devices that seal: their key, and what their pages look like from outside. */
#ifndef ISW_TEST_SEAL_FIXTURE_H
#define ISW_TEST_SEAL_FIXTURE_H

#include <string.h>

#include "check.h"
#include "engine/state/seal.h"
#include "isw.h"
#include "seal/seal.h"

/* The key of this program's devices. */
static inline int test_key_fd(void)
{
	static int fd = -1;
	struct isw_error error = {0};

	if (fd < 0)
		CHECK_OK(isw_seal_key_make(&fd, &error), error);
	return fd;
}

/* ISW_ENGINE_SEAL where this build and this host can. */
static inline uint32_t test_seal_flag(void)
{
	const char *name;

	return isw_seal_check(&name, NULL) ? 0 : ISW_ENGINE_SEAL;
}

/* The page as it is in clear is the one that its seal stands for: sealed again, it has that tag. */
static inline bool is_newest(struct isw_engine *e, uint64_t page, const unsigned char *data)
{
	static unsigned char out[ISW_PAGE_BYTES];
	unsigned char tag[ISWI_SEAL_TAG_BYTES];
	struct iswi_sealing what = {
		.data = &page,
		.data_bytes = sizeof(page),
		.in = data,
		.out = out,
		.bytes = sizeof(out),
	};
	struct iswi_seal seal;

	iswi_seal_of(e, page, &seal);
	if (!iswi_sealed(e))
		return iswi_crc32c(data, ISW_PAGE_BYTES) == seal.number;
	what.key = iswi_epoch_of(seal.number);
	memcpy(what.nonce + 4, &seal.number, sizeof(seal.number));
	e->seal_ops->seal(e->sealer, &what, tag);
	return !memcmp(tag, seal.tag, sizeof(tag));
}

#endif
