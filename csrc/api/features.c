/* SPDX-License-Identifier: Apache-2.0 */
/* What this build is and has. */
#include "isw.h"

#ifndef ISW_VERSION
#error "ISW_VERSION comes from CMake"
#endif

uint32_t isw_features(void)
{
	uint32_t features = 0;

#ifdef ISW_HAVE_URING
	features |= ISW_FEATURE_URING;
#endif
#ifdef ISW_HAVE_RDMA
	features |= ISW_FEATURE_RDMA;
#endif
#if defined(ISW_HAVE_OPENSSL) || defined(ISW_HAVE_IPSEC_MB)
	features |= ISW_FEATURE_SEAL;
#endif
	return features;
}

const char *isw_version(void)
{
	return ISW_VERSION;
}
